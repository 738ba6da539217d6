"""Sections `pair-*`: P and D as two processes on one device, and the death of P in the middle."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

from bench_kit.servers import Server

from gpu_kit.findings import Findings
from gpu_kit.questions import Answers, ask, compare, first_token_ms, kept_answers, killed_questions, questions
from gpu_kit.servers import check_bits, check_compiles, end, engine_flags, servers
from gpu_kit.setting import Setting

STRUCK_AFTER = 8  # the blow comes when one stream in so many has its first token
LOOK_S = 0.01
AGAIN = {"refetch"}  # what comes of a process that waits for a core, on a CPU that all processes share
ANEW = "shm"  # there D finds no compiled programs. Elsewhere it has P's: nothing is shown of two machines


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    backend = _backend(setting)
    flags = (*engine_flags(setting), "--kv-transfer-backend", backend)
    with servers(setting) as started:
        producer, address = started.launch("prefill", "--role", "prefill", *flags)
        cache = {"JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp(dir=setting.scratch)} if backend == ANEW else {}
        consumer, _ = started.launch("decode", "--role", "decode", "--prefill", address, *flags, env=cache)
        prefill, decode = started.wait(producer), started.wait(consumer)
        decode.wait_for_peer(setting.clock.left_s())
        findings.fact(P_warmup_s=prefill.ready.warmup_s, D_warmup_s=decode.ready.warmup_s, D_compiled_anew=bool(cache))
        answers = kept_answers(setting)
        beside = {} if answers is None else {"unified": answers.bits}
        check_bits(findings, P=prefill.ready.bits, D=decode.ready.bits, **beside)
        _first_tokens(setting, decode, answers, findings)
        _undisturbed(setting, decode, answers, findings)
        findings.fact(P_prompt_tokens=int(prefill.counters()["jdisagg_prefill_tokens_total"]))
        check_compiles(prefill, findings, "P")
        findings.attempt("kill -9 of P", lambda: _struck(setting, prefill, decode, answers, findings))
        check_compiles(decode, findings, "D")
        end(decode, findings, "D")


def _first_tokens(setting: Setting, decode: Server, answers: Answers | None, findings: Findings) -> None:
    for length, times in first_token_ms(decode.client, setting.scale).items():
        beside = statistics.median(answers.first_ms[length]) if answers is not None else None
        ms = statistics.median(times)
        findings.row("TTFT", tokens=length, ms=ms, unified_ms=beside or "not run", more_ms=ms - beside if beside else "")


def _undisturbed(setting: Setting, decode: Server, answers: Answers | None, findings: Findings) -> None:
    scale, asked, backend = setting.scale, questions(setting.scale), _backend(setting)
    found = ask(decode.client, asked, scale.at_once)
    after = decode.counters()
    if answers is None:
        findings.left_out("equal streams", "unified left no answers")
    else:
        compare("every stream is unified's", found, answers.streams, findings)
    moved = decode.bytes_by_backend()
    findings.check(f"all KV came over {backend}", set(moved) == {backend}, str(moved))
    computed = after["jdisagg_prefill_tokens_total"]
    findings.check("D computed no prompt", computed == 0, f"{computed:g} tokens")
    rungs = decode.recoveries_by_rung()
    findings.check("nothing had to recover", not rungs.keys() - (AGAIN if setting.small else set()), str(rungs))
    seconds, num_bytes = after["jdisagg_transfer_seconds_sum"], after["jdisagg_transfer_bytes_total"]
    findings.fact(
        streams=len(found), transferred_bytes=int(num_bytes), gb_per_s_of_a_fetch=num_bytes / max(seconds, 1e-9) / 1e9
    )


def _backend(setting: Setting) -> str:
    return setting.name.removeprefix("pair-")


def _struck(setting: Setting, prefill: Server, decode: Server, answers: Answers | None, findings: Findings) -> None:
    """P is killed with streams in every state: one half is asked for before, and computed for all that is known; for the other
    half P stands still, so that it surely dies with hand-offs under way."""
    asked = killed_questions(setting.scale)
    half, begun = len(asked) // 2, Semaphore(0)
    with ThreadPoolExecutor(2) as threads:
        before = threads.submit(ask, decode.client, asked[:half], half, begun.release)
        for _ in range(max(1, len(asked) // STRUCK_AFTER)):
            begun.acquire(timeout=setting.clock.left_s())
        os.kill(prefill.pid, signal.SIGSTOP)
        struck_s = time.monotonic()
        known = decode.handoffs()
        after = threads.submit(ask, decode.client, asked[half:], len(asked) - half)
        _wait_for_another(setting, decode, known)
        os.kill(prefill.pid, signal.SIGKILL)
        found = [*before.result(), *after.result()]
    counted = decode.counters()
    gap_s = max(stream.longest_wait_s(struck_s) for stream in found)
    findings.fact(streams_under_way=len(found), recoveries=int(counted["jdisagg_recoveries_total"]), longest_gap_ms=1e3 * gap_s)
    findings.check("the death of P was felt", counted["jdisagg_recoveries_total"] > 0)
    if answers is not None:
        compare("every stream goes on as if nothing had happened", found, answers.killed, findings)


def _wait_for_another(setting: Setting, decode: Server, known: set[str]) -> None:
    """Until D has opened a hand-off that is none of these, or has given up P. Raises RuntimeError when the time is over."""
    while not decode.handoffs() - known and decode.counters()["jdisagg_recoveries_total"] == 0:
        if setting.clock.left_s() == 0.0:
            raise RuntimeError("D opens no hand-off with a P that stands still")
        time.sleep(LOOK_S)
