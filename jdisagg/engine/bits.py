"""What bits an `exact` worker computes, as a short string: tried, not declared.

Every token of a stream is the same bit for bit wherever it is computed, as long as one executable of one compiler runs on one
kind of device. Another jax, another processor, another number of shards or a kernel that a compiler picked by its own timing
each may round elsewhere. So a worker computes one fixed prompt before it says READY, and two workers compare what came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np
import xxhash

from jdisagg.core.requests import SamplingParams
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.token_index import spans
from jdisagg.sched.plan import Admit, PageTable, Plan, PrefillChunk, Sampled

_PROBE = "a"  # to be changed with anything that the hash is made of: bits of unlike probes are not compared
PROBE_TOKENS = 48  # three tiles: the later ones read pages that the earlier ones wrote
_STRIDE = 7919  # from one token id of the probe to the next
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)


def compute_bits(runner: ModelRunner) -> str:
    """Hash of a probe's KV in all layers, of the token sampled behind it and of its log-probabilities, behind the name of the
    probe, which has its number of tokens, as a short `max_model_len` takes fewer. Runs warmed executables of a runner that
    nobody uses yet, in slot 0 and the first pages, and leaves both free."""
    num_tokens = min(PROBE_TOKENS, max(1, runner.max_model_len - 1))
    token_ids = tuple(n * _STRIDE % runner.device.shape.vocab_size for n in range(num_tokens))
    page_table = (tuple(range(1, 1 + -(-num_tokens // runner.page_size))),)
    admit = Admit(
        slot=0,
        request_id="",
        choice=0,
        sampling=_SAMPLING,
        stop_ids=(),
        page_table=page_table,
        prompt_token_ids=token_ids,
        generated_token_ids=(),
        decodes=False,
    )
    chunk = PrefillChunk(slot=0, request_id="", start=0, token_ids=token_ids, samples=True)
    result = runner.collect(runner.dispatch(Plan(step_id=0, admit=(admit,), prefill=(chunk,))))
    runner.collect(runner.dispatch(Plan(step_id=0, evict=(0,))))
    digest = xxhash.xxh3_64()
    for array in (*_answer(result.sampled), *_kv(runner, page_table, num_tokens)):
        digest.update(array.tobytes())
    return f"{_PROBE}{num_tokens}-{digest.hexdigest()}"


def _answer(sampled: Sequence[Sampled]) -> Iterator[np.ndarray]:
    """Tokens i64 and log-probabilities f64."""
    for one in sampled:
        found = [pair for scored in one.logprobs or () for pair in ((scored.token_id, scored.logprob), *scored.top)]
        yield np.array([*one.token_ids, *(token_id for token_id, _ in found)], np.int64)
        yield np.array([logprob for _, logprob in found], np.float64)


def _kv(runner: ModelRunner, page_table: PageTable, num_tokens: int) -> list[np.ndarray]:
    """Data, and scales of int8 data, [L, num_tokens, K, F or 2], whatever the size of a piece."""
    ranges = spans(num_tokens, runner.chunk_tokens)
    pieces = [jax.device_get(runner.export_tokens(page_table, *one).arrays) for one in ranges]
    return [np.concatenate(parts, axis=1)[:, :num_tokens] for parts in zip(*pieces, strict=True)]
