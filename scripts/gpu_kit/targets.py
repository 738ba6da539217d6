"""What is wanted of an accelerator: each has a line in the report, also where its section did not come to it."""

from __future__ import annotations

from gpu_kit.findings import Target

HANDOFF = Target(name="hand-off between two processes over jax", wanted=5.0, unit="GB/s")
OF_TCP = Target(name="hand-off over jax: share of what a plain TCP socket moves", wanted=0.8, unit="of it")
DECODE = Target(name="decode step, batch 32, context 1024: share of the measured memory roofline", wanted=0.75, unit="of it")
PREFILL = Target(name="prefill of 4096 tokens: share of the measured matmul rate", wanted=0.5, unit="of it")
BATCHED = Target(name="tokens/s of jdisagg.batch over transformers' continuous batching", wanted=3.0, unit="times")
FORETOLD_BYTES = Target(name="bytes of weights and pool, off what was foretold", wanted=0.03, unit="of them", at_least=False)
FORETOLD_8B = Target(
    name="decode step of Llama 3 8B, batch 32, context 1024: off what aot foretells", wanted=0.25, unit="of it", at_least=False
)
FORETOLD_TIME = Target(name="decode step, off what was foretold", wanted=0.25, unit="of it", at_least=False)
