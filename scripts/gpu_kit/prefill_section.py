"""Section `prefill`: one prompt of Llama 3 8B in bfloat16 in one step, against its products at the measured matmul rate."""

from __future__ import annotations

import statistics

from bench_kit.figures import spread
from bench_kit.roofline import matmul_flop_per_s

from gpu_kit.engine_steps import StepBench
from gpu_kit.findings import Findings
from gpu_kit.setting import Setting
from gpu_kit.targets import PREFILL

TARGET_TOKENS = 4096  # measured first, and then told at once: time may run out
COMPILE_SHARE = 0.7  # of the time there is
LEAST_S = 4.0


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    scale = setting.scale
    rate = statistics.median(matmul_flop_per_s(scale.matmul_size, repeats=scale.repeats))
    bench = StepBench(setting, num_slots=1, max_model_len=max(scale.prefill_tokens))
    prompts = {num_tokens: bench.prompt(num_tokens) for num_tokens in scale.prefill_tokens}
    executables = bench.compiled("prefill", prompts, COMPILE_SHARE * setting.clock.left_s())
    findings.fact(matmul_tflop_per_s=rate / 1e12)
    for num_tokens, prompt in prompts.items():
        if num_tokens not in executables:
            findings.left_out(f"{num_tokens} tokens", "not compiled in time")
            continue
        if setting.clock.left_s() < (0 if setting.small else LEAST_S):
            findings.left_out(f"{num_tokens} tokens", "out of time")
            continue
        bench.set_lengths(1, num_tokens)
        times = bench.seconds(executables[num_tokens], prompt, repeats=scale.repeats, steps=1)
        seconds, flop = statistics.median(times), bench.costs.prefill_flop(num_tokens)
        share = flop / seconds / rate
        findings.row(
            "prefill step",
            tokens=num_tokens,
            ms=spread(times, ".4g", 1e3),
            tflop_per_s=flop / seconds / 1e12,
            share=share,
            tokens_per_s=num_tokens / seconds,
        )
        if num_tokens == TARGET_TOKENS:
            findings.target(PREFILL, share)
    if setting.small:
        findings.target(PREFILL, None, "no accelerator")
