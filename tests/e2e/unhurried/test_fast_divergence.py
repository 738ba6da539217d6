"""In `fast`, a stream may leave another way of serving only where two tokens are nearly tied; how often is printed."""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path

from tests.e2e.client import Asked, Got, run_all
from tests.e2e.conftest import MAX_MODEL_LEN, PATIENT, SMALL, Start
from tests.e2e.mixed import mixed_requests

COUNT = int(os.environ.get("JDISAGG_FAST_COUNT", "60"))
LARGEST_TIE = 1e-3  # nats between the two best tokens: floats of two batch shapes differ by about 1e-5 here


def greedy_with_alternatives(asked: Asked) -> Asked:
    """The same prompt, greedy, with the two best tokens of every position."""
    sampling = {"max_tokens": asked.sampling["max_tokens"], "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    return Asked(prompt=asked.prompt, sampling=sampling, request_id=asked.request_id)


def first_divergence(one: Got, other: Got) -> int | None:
    """Index of the first differing token."""
    pairs = enumerate(zip_longest(one.tokens[0], other.tokens[0]))
    return next((index for index, (a, b) in pairs if a != b), None)


def test_streams_differ_only_at_near_ties(start: Start, tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--numerics", "fast", *SMALL, *PATIENT)
    unified = start("unified", "--role", "unified", *flags)
    prefill = start("prefill", "--role", "prefill", *flags).wait_ready()
    peers = ("--prefill", prefill.grpc, "--local-prefill", "never")
    decode = start("decode", "--role", "decode", *peers, *flags).wait_ready()
    unified.wait_ready()
    mixed = mixed_requests(COUNT, vocab_size=1024, max_model_len=MAX_MODEL_LEN, seed=11)
    requests = [greedy_with_alternatives(asked) for asked in mixed]
    wanted, got = run_all(unified.grpc, requests), run_all(decode.grpc, requests, at_once=11)
    diverged: list[tuple[str, int, float]] = []
    for asked, one, other in zip(requests, wanted, got, strict=True):
        assert one.error is None, one.error
        assert other.error is None, other.error
        assert len(other.tokens[0]) == len(one.tokens[0]) == asked.sampling["max_tokens"]
        if (index := first_divergence(one, other)) is not None:
            diverged.append((asked.request_id, index, one.top_gaps[0][index]))
    total = sum(len(one.tokens[0]) for one in wanted)
    print(f"\nfast: {len(diverged)} of {len(requests)} greedy streams diverge ({total} tokens compared)")
    for request_id, index, gap in diverged:
        print(f"  {request_id}: token {index}, the two best were {gap:.2e} nats apart")
    assert all(gap < LARGEST_TIE for _, _, gap in diverged)
    assert decode.metric("jdisagg_prefill_tokens_total", role="decode") == 0
