"""Workers unlike in page size, chunk size, tensor parallelism and KV dtype pair: over processes, and in one (colocated)."""

from __future__ import annotations

import random

import pytest

from tests.e2e.client import Asked, Got, run_all
from tests.e2e.conftest import MAX_MODEL_LEN, PATIENT, Start
from tests.e2e.mixed import mixed_requests
from tests.e2e.processes import ServerProcess
from tests.e2e.tiny_model import HEAD_DIM, KV_HEADS, LAYERS

ROWS = LAYERS * KV_HEADS
FLOAT32, INT8 = ROWS * 2 * HEAD_DIM * 4, ROWS * (2 * HEAD_DIM + 8)  # bytes of one token
UNCACHED = "--no-enable-prefix-caching"


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    asked = mixed_requests(40, vocab_size=1024, max_model_len=MAX_MODEL_LEN)
    return [one for one in asked if one.n == 1]


def serve(server: ServerProcess, requests: list[Asked]) -> list[Got]:
    got = run_all(server.grpc, requests)
    assert all(one.error is None for one in got), [one.error for one in got if one.error][:1]
    assert server.metric("jdisagg_compiles_after_ready_total") == 0
    return got


def bytes_per_token(got: list[Got]) -> set[float]:
    """Of what crossed, per request that needed KV at all."""
    sent = [one.complete.choices[0].provenance for one in got if one.complete is not None]
    sent = [provenance for provenance in sent if provenance.transferred_tokens]
    assert len(sent) > len(got) // 2
    return {provenance.transferred_bytes / provenance.transferred_tokens for provenance in sent}


@pytest.mark.covers("I-8", "C02")
def test_one_p_feeds_a_d_of_other_pages_and_chunks_exactly_and_one_of_another_dtype_and_tp(
    start: Start, exact_flags: tuple[str, ...], requests: list[Asked], unified: ServerProcess
) -> None:
    prefill = start("prefill", "--role", "prefill", *exact_flags, *PATIENT, UNCACHED).wait_ready()
    flags = ("--role", "decode", "--prefill", prefill.grpc, "--local-prefill", "never", *exact_flags, *PATIENT, UNCACHED)
    alike = start("decode", *flags, "--page-size", "8", "--transfer-chunk-tokens", "20").wait_ready()
    int8 = ("--kv-cache-dtype", "int8", "--tensor-parallel-size", "2", "--page-size", "32", "--transfer-chunk-tokens", "96")
    other = start("decode", *flags, *int8).wait_ready()

    wanted, got = serve(unified, requests), serve(alike, requests)
    for one, reference in zip(got, wanted, strict=True):
        assert one.essence() == reference.essence()
        assert one.logprobs == reference.logprobs
    converted = serve(other, requests)
    for one, reference in zip(converted, wanted, strict=True):
        assert {index: tokens[0] for index, tokens in one.tokens.items()} == {
            index: tokens[0] for index, tokens in reference.tokens.items()
        }, "the first token is P's"
    assert bytes_per_token(got) == bytes_per_token(converted) == {FLOAT32}, "what travels is in P's dtype"
    assert prefill.metric("jdisagg_compiles_after_ready_total") == 0
    told = f"prefill peer {prefill.grpc} computes bits "
    assert [decode.log.read_text().count(told) for decode in (alike, other)] == [0, 1], "tried, not guessed from flags"


def test_a_prefill_worker_of_two_devices_stands_a_burst(start: Start) -> None:
    """On two cores its devices once waited for each other in a step that never ended."""
    model = ("--numerics", "exact", "--max-model-len", "512", "--page-size", "8", "--num-pages", "400", *PATIENT)
    prefill = start("prefill", "--role", "prefill", *model, "--tensor-parallel-size", "2")
    flags = ("--role", "decode", "--prefill", prefill.wait_ready().grpc, "--local-prefill", "never")
    decode = start("decode", *flags, *model).wait_ready()
    rng = random.Random(11)
    lengths = [rng.randrange(20, 450) for _ in range(80)]
    prompts = [tuple(rng.randrange(16, 1000) for _ in range(length)) for length in lengths]
    got = serve(decode, [Asked(prompt=prompt, n=3, sampling={"max_tokens": 6, "ignore_eos": True}) for prompt in prompts])
    assert not any(one.complete.choices[0].provenance.recoveries for one in got if one.complete is not None)
    assert prefill.process.poll() is None
    assert "rendezvous" not in prefill.log_since_ready()


@pytest.mark.covers("I-8")
def test_colocated_meshes_of_unlike_size_hand_int8_over_as_it_is(
    start: Start, exact_flags: tuple[str, ...], requests: list[Asked]
) -> None:
    int8 = ("--kv-cache-dtype", "int8", *exact_flags, UNCACHED)
    meshes = ("--prefill-tp", "2", "--decode-tp", "4", "--local-prefill", "never")
    colocated = start("colocated", "--role", "colocated", *meshes, *int8).wait_ready()
    got = serve(colocated, requests)
    assert bytes_per_token(got) == {INT8}
    assert len({token for one in got for token in one.tokens[0]}) > 100
