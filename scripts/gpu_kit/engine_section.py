"""Sections `unified` and `colocated`: one process answers all streams; the answers of the first are everybody's reference."""

from __future__ import annotations

import statistics
import time

from bench_kit.servers import Server

from gpu_kit.findings import Findings
from gpu_kit.questions import Answers, ask, compare, first_token_ms, kept_answers, killed_questions, questions, varied
from gpu_kit.servers import check_bits, check_compiles, end, engine_flags, servers
from gpu_kit.setting import Setting


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    colocated = setting.name == "colocated"
    flags = ("--role", setting.name, *engine_flags(setting, share=not colocated))
    with servers(setting) as started:
        process, _ = started.launch(setting.name, *flags)
        server = started.wait(process)
        findings.fact(warmup_s=server.ready.warmup_s, executables=server.ready.executables, bits=server.ready.bits or "")
        if colocated:
            _colocated(setting, server, findings)
        else:
            _unified(setting, server, findings)
        check_compiles(server, findings, setting.name)
        end(server, findings, setting.name)


def _unified(setting: Setting, server: Server, findings: Findings) -> None:
    scale = setting.scale
    first_ms = first_token_ms(server.client, scale)
    for length, times in first_ms.items():
        findings.row("TTFT", tokens=length, ms=statistics.median(times))
    before = server.counters()
    began_s = time.monotonic()
    found = ask(server.client, questions(scale), scale.at_once)
    seconds = time.monotonic() - began_s
    after = server.counters()
    killed = ask(server.client, killed_questions(scale), scale.at_once)
    Answers(
        streams=[list(stream.token_ids) for stream in found],
        killed=[list(stream.token_ids) for stream in killed],
        first_ms=first_ms,
        bits=server.ready.bits,
    ).keep(setting)
    findings.check("the streams are varied", varied(found))
    again = ask(server.client, questions(scale)[: scale.at_once], 1, cache_salt="again")
    findings.check("alone, prompts are computed again", not any(stream.cached_tokens for stream in again))
    compare("alone, streams say what they said among others", again, [s.token_ids for s in found[: scale.at_once]], findings)
    name = "jdisagg_host_overhead_seconds"
    ticks = after[f"{name}_count"] - before[f"{name}_count"]
    overhead_s = (after[f"{name}_sum"] - before[f"{name}_sum"]) / max(1.0, ticks)
    step_s = after["jdisagg_step_seconds_sum"] - before["jdisagg_step_seconds_sum"]
    steps = after["jdisagg_step_seconds_count"] - before["jdisagg_step_seconds_count"]
    findings.fact(
        streams=len(found),
        stream_tokens_per_s=sum(len(stream.token_ids) for stream in found) / seconds,
        host_overhead_us_per_step=1e6 * overhead_s,
        step_ms=1e3 * step_s / max(1.0, steps),
    )


def _colocated(setting: Setting, server: Server, findings: Findings) -> None:
    scale, answers = setting.scale, kept_answers(setting)
    for length, times in first_token_ms(server.client, scale).items():
        findings.row("TTFT", tokens=length, ms=statistics.median(times))
    found = ask(server.client, questions(scale), scale.at_once)
    if answers is None:
        findings.left_out("equal streams", "unified left no answers")
    else:
        compare("every stream is unified's", found, answers.streams, findings)
        check_bits(findings, colocated=server.ready.bits, unified=answers.bits)
    moved = server.bytes_by_backend()
    findings.fact(**{f"{backend}_bytes": int(count) for backend, count in moved.items()})
    findings.check("KV went from mesh to mesh", moved.get("device_put", 0) > 0, str(moved))
