"""Section `decode`: one decode step of Llama 3 8B in bfloat16 against the time its bytes take at the measured copy rate."""

from __future__ import annotations

import statistics
from typing import Any

from bench_kit.figures import spread
from bench_kit.roofline import copy_bytes_per_s

from gpu_kit.engine_steps import PAGE_SIZE, StepBench
from gpu_kit.findings import Findings
from gpu_kit.setting import Setting
from gpu_kit.targets import DECODE, FORETOLD_8B

TARGET_BATCH, TARGET_CONTEXT = 32, 1024  # measured first, and then told at once: time may run out
COMPILE_SHARE = 0.7  # of the time there is
LEAST_S = 4.0  # a measurement with less time left is not begun


def run(setting: Setting, findings: Findings) -> None:
    """See Section. KV is zeros, weights are random. The rate is measured first: later the cache has all the memory."""
    scale = setting.scale
    rate = statistics.median(copy_bytes_per_s(scale.copy_bytes, repeats=scale.repeats))
    room = PAGE_SIZE * 8  # the steps of all measurements make sequences longer
    bench = StepBench(setting, num_slots=max(scale.decode.batches), max_model_len=max(scale.decode.contexts) + room)
    batches = {batch: bench.decode_rows(batch) for batch in scale.decode.batches}
    executables = bench.compiled("decode", batches, COMPILE_SHARE * setting.clock.left_s())
    findings.fact(
        copy_gb_per_s=rate / 1e9,
        weights_gb=bench.costs.read_bytes / 1e9,
        kv_bytes_per_token=bench.costs.kv_bytes,
        cache_tokens=bench.num_tokens,
    )
    for batch in scale.decode.batches:
        if batch not in executables:
            findings.left_out(f"batch {batch}", "not compiled in time")
            continue
        for wanted in scale.decode.contexts:
            if setting.clock.left_s() < (0 if setting.small else LEAST_S):
                findings.left_out(f"batch {batch}, context {wanted}", "out of time")
                continue
            share, off = _measure(setting, bench, executables[batch], batch, wanted, rate, findings)
            if (batch, wanted) == (TARGET_BATCH, TARGET_CONTEXT):
                findings.target(DECODE, share)
                findings.target(FORETOLD_8B, off, "aot does not know what this device reaches")
    if setting.small:
        findings.target(DECODE, None, "no accelerator")
        findings.target(FORETOLD_8B, None, "no accelerator")


def _measure(  # noqa: PLR0917
    setting: Setting, bench: StepBench, executable: Any, batch: int, wanted: int, rate: float, findings: Findings
) -> tuple[float, float | None]:
    """One row; the share of the roofline that was reached, and how far off aot was."""
    scale = setting.scale
    steps = (scale.repeats + 2) * scale.decode.steps
    context = min(wanted, bench.num_tokens // batch - PAGE_SIZE - steps)
    bench.set_lengths(batch, context, room=steps)
    times = bench.seconds(executable, bench.decode_rows(batch), repeats=scale.repeats, steps=scale.decode.steps)
    bound_s = bench.costs.decode_bytes(batch, context) / rate
    seconds, foretold_s = statistics.median(times), bench.foretold_s(batch, context)
    findings.row(
        "decode step",
        batch=batch,
        context=context,
        asked=wanted,
        ms=spread(times, ".4g", 1e3),
        foretold_ms=1e3 * foretold_s if foretold_s else None,
        roofline_ms=1e3 * bound_s,
        share=bound_s / seconds,
        tokens_per_s=batch / seconds,
    )
    return bound_s / seconds, abs(seconds - foretold_s) / foretold_s if foretold_s else None
