"""Section `aot`: what `python -m jdisagg.aot` foretells of this device, tried on it.

The pages it promises start and serve, a tenth more does not fit, bytes and step time are as foretold.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from bench_kit.roofline import seconds_each

from gpu_kit.findings import Findings, Skipped
from gpu_kit.setting import Setting
from gpu_kit.shapes import TOPOLOGIES, served_shape
from gpu_kit.targets import FORETOLD_BYTES, FORETOLD_TIME
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role, SamplingParams
from jdisagg.core.settings import load_config
from jdisagg.engine.build import make_runner
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.warmup import warm_up
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.sharding import make_mesh
from jdisagg.sched.plan import Admit, Plan
from jdisagg.serve.cores import usable_cores

MORE = 1.1
NUM_SEQS = 4  # one decode executable: every one takes seconds to compile
ROOM_TOKENS = 64
SHARE = "0.97"  # of the runtime's limit: a tenth more pages is then past it
LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Word:
    """What was foretold."""

    num_pages: int
    pool_bytes: int
    weights_bytes: int
    decode_s: float | None  # of NUM_SEQS rows at `context`; None where no rates are known
    context: int


def run(setting: Setting, findings: Findings) -> None:
    """See Section. Raises Skipped where no topology is known."""
    kind = jax.devices()[0].device_kind
    if kind not in TOPOLOGIES:
        raise Skipped(f"no topology is known for {kind}")
    longest = 256 if setting.small else 2048
    model = served_shape(small=setting.small).write(setting.scratch / "aot", longest)
    flags = (
        *("--model", str(model), "--load-format", "dummy", "--dtype", "float32" if setting.small else "bfloat16"),
        *("--max-num-seqs", str(NUM_SEQS), "--max-num-batched-tokens", "64"),
    )
    word = _ask(setting, TOPOLOGIES[kind], flags)
    findings.fact(pages=word.num_pages, pool_bytes=word.pool_bytes, weights_bytes=word.weights_bytes)
    device = jax.devices()[0]
    mesh, before = make_mesh([device], 1), _bytes_in_use(device)
    config = load_config(["--role", "unified", *flags, "--num-pages", str(word.num_pages)])
    loaded = load_model(config.model, mesh, seed=0)
    runner = make_runner(loaded, mesh, config, Role.UNIFIED)
    executables = warm_up(runner, num_cores=usable_cores())
    findings.check("the pages that were promised start", runner.num_pages == word.num_pages, f"{len(executables)} executables")
    _bytes(device, before, word, findings)
    _time(setting, runner, word, findings)
    del runner
    gc.collect()
    _refused(loaded, mesh, flags, word, findings)


def _ask(setting: Setting, topology: str, flags: tuple[str, ...]) -> Word:
    answer = setting.scratch / "aot.json"
    serve_flags = [flag for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] != "--load-format" for flag in pair]
    command = [sys.executable, "-m", "jdisagg.aot", "--topology", topology, "--no-compile", "--json", str(answer)]
    command += [*serve_flags, "--device-memory-utilization", SHARE]
    limit_s = min(LIMIT_S, setting.clock.left_s())
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if not answer.exists():
        raise RuntimeError(f"jdisagg.aot: exit status {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    (engine,) = json.loads(answer.read_text())["engines"]
    budget = engine["budget"]
    times = [time for time in engine["times"] if time["workload"]["phase"] == "decode" and time["workload"]["rows"] == NUM_SEQS]
    first = min(times, key=lambda time: time["workload"]["context"], default=None)
    return Word(
        num_pages=budget["num_pages"],
        pool_bytes=budget["pool_bytes"],
        weights_bytes=budget["weights_bytes"],
        decode_s=None if first is None else first["expected_s"] or first["step_s"],
        context=0 if first is None else first["workload"]["context"],
    )


def _bytes_in_use(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_in_use")


def _bytes(device: Any, before: int | None, word: Word, findings: Findings) -> None:
    """Weights and pool; what steps need comes and goes."""
    after = _bytes_in_use(device)
    if before is None or after is None:
        findings.target(FORETOLD_BYTES, None, "this platform does not count bytes")
        return
    foretold, used = word.weights_bytes + word.pool_bytes, after - before
    findings.fact(foretold_bytes=foretold, used_bytes=used)
    findings.target(FORETOLD_BYTES, abs(used - foretold) / foretold)


def _time(setting: Setting, runner: ModelRunner, word: Word, findings: Findings) -> None:
    """A decode step of all slots, each with the context that was asked about, against its bound."""
    context = word.context or runner.max_model_len // 2
    needed = -(-(context + ROOM_TOKENS) // runner.page_size)
    admits = tuple(_admit(slot, range(1 + slot * needed, 1 + (slot + 1) * needed), context) for slot in range(NUM_SEQS))
    rows = tuple(range(NUM_SEQS))
    result = runner.collect(runner.dispatch(Plan(step_id=1, admit=admits, decode=rows)))
    findings.check("the pages that were promised serve", len(result.sampled) == NUM_SEQS, f"{len(result.sampled)} tokens")
    slots = np.arange(NUM_SEQS, dtype=np.int32)
    times = seconds_each(lambda: runner.device.decode(slots).sampling.tokens, repeats=setting.scale.repeats)
    seconds = statistics.median(times)
    began_s = time.perf_counter()
    result = runner.device.decode(slots)
    called_s = time.perf_counter() - began_s
    jax.block_until_ready(result.sampling.tokens)
    findings.fact(decode_call_ms=1e3 * called_s)  # of which a short step may be longer than the device's part
    findings.fact(decode_ms=1e3 * seconds, foretold_ms=1e3 * word.decode_s if word.decode_s else None)
    off = None if word.decode_s is None else abs(seconds - word.decode_s) / word.decode_s
    findings.target(FORETOLD_TIME, off, "no rates are known of this platform")


def _admit(slot: int, pages: range, context: int) -> Admit:
    """A sequence whose KV is said to be there."""
    return Admit(
        slot=slot,
        request_id=f"aot-{slot}",
        choice=0,
        sampling=SamplingParams(max_tokens=ROOM_TOKENS),
        stop_ids=(),
        page_table=(tuple(pages),),
        prompt_token_ids=(1,) * (context - 1),
        generated_token_ids=(2,),
        decodes=True,
    )


def _refused(loaded: LoadedModel, mesh: Any, flags: tuple[str, ...], word: Word, findings: Findings) -> None:
    """A tenth more pages."""
    if _bytes_in_use(mesh.devices.flat[0]) is None:
        findings.left_out("a tenth more pages is refused", "this platform has no limit to run into")
        return
    config: Config = load_config(["--role", "unified", *flags, "--num-pages", str(int(MORE * word.num_pages))])
    try:
        runner = make_runner(loaded, mesh, config, Role.UNIFIED)
        warm_up(runner)
    except (ConfigError, RuntimeError) as refusal:
        for_memory = isinstance(refusal, ConfigError) or "RESOURCE_EXHAUSTED" in str(refusal)
        findings.check("a tenth more pages is refused", for_memory, str(refusal)[:200])
    else:
        findings.check("a tenth more pages is refused", False, f"{runner.num_pages} pages started")
