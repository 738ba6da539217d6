"""In `exact`, the way of serving does not show in a single bit; and nothing compiles, leaks or is computed twice on the way."""

from __future__ import annotations

import os

import pytest

from tests.e2e.blows import assert_quiescent, assert_same
from tests.e2e.client import Asked, Got, run_all
from tests.e2e.conftest import MAX_MODEL_LEN, Pair, Start
from tests.e2e.mixed import VOCAB, mixed_requests
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tiny_model import HEAD_DIM, KV_HEADS, LAYERS

COUNT = int(os.environ.get("JDISAGG_MIXED_COUNT", "120"))
BYTES_PER_TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4  # float32


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    return mixed_requests(COUNT, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def reference(unified: ServerProcess, requests: list[Asked]) -> list[Got]:
    got = run_all(unified.grpc, requests)
    assert all(one.error is None for one in got), [one.error for one in got if one.error][:1]
    return got


def compilations(log: str) -> list[str]:
    return [line for line in log.splitlines() if "Compiling" in line or "XLA compilation" in line]


def assert_nothing_compiled_since_ready(server: ServerProcess) -> None:
    assert compilations(server.log.read_text(errors="replace")), "the log of a start tells what was compiled"
    assert compilations(server.log_since_ready()) == []
    assert server.metric("jdisagg_compiles_after_ready_total") == 0


def test_streams_vary_so_that_equality_means_something(reference: list[Got]) -> None:
    tokens = {token for one in reference for choice in one.tokens.values() for token in choice}
    assert len(tokens) > 300


def test_repeating_the_requests_gives_the_same_bits(
    unified: ServerProcess, requests: list[Asked], reference: list[Got]
) -> None:
    assert_same(requests, reference, run_all(unified.grpc, requests, at_once=5))


def test_pair_equals_unified_and_bytes_are_as_computed(pair: Pair, requests: list[Asked], reference: list[Got]) -> None:
    before, recovered = (pair.decode.metric(name) for name in ("jdisagg_transfer_bytes_total", "jdisagg_recoveries_total"))
    got = run_all(pair.decode.grpc, requests)
    assert_same(requests, reference, got)
    expected = 0
    for asked, one in zip(requests, got, strict=True):
        assert one.complete is not None
        moved = [choice.provenance.transferred_bytes for choice in one.complete.choices]
        whole = len(asked.prompt) * BYTES_PER_TOKEN
        assert set(moved) <= {0, whole}, asked.request_id
        if any(len(choice.token_ids) > 1 for choice in one.complete.choices):
            assert whole <= sum(moved) < max(2, asked.n) * whole, f"{asked.request_id}: choices share transfers"
        if asked.sampling["max_tokens"] == 1:
            assert sum(moved) == 0, asked.request_id
        expected += sum(moved)
    assert expected > 0
    assert pair.decode.metric("jdisagg_transfer_bytes_total") - before >= expected
    assert pair.decode.metric("jdisagg_prefill_tokens_total", role="decode") == 0
    assert pair.decode.metric("jdisagg_recoveries_total") == recovered


def test_pair_is_quiescent_and_leaks_nothing(pair: Pair, requests: list[Asked]) -> None:
    assert_leaks_nothing(pair.decode, requests, pair.prefill, pair.decode)


def test_unified_leaks_nothing(unified: ServerProcess, requests: list[Asked]) -> None:
    assert_leaks_nothing(unified, requests, unified)


def assert_leaks_nothing(edge: ServerProcess, requests: list[Asked], *servers: ServerProcess) -> None:
    """Rounds of requests end with the pages, threads, descriptors and sockets of the round before."""
    for _ in range(2):  # pools of threads fill up to their bound, connections open
        run_all(edge.grpc, requests)
    for server in servers:
        assert_quiescent(server)
    before = [server.held() for server in servers]
    for _ in range(3):
        run_all(edge.grpc, requests)
    for server, was in zip(servers, before, strict=True):
        assert_quiescent(server)
        wait_until(lambda s=server, w=was: s.held().no_more_than(w), 30, f"{server.flags[1]}: no more than {was}", server.held)
        print(f"\n{server.flags[1]}: {was} -> {server.held()} after 3 x {len(requests)} requests")


def test_nothing_compiles_after_ready(unified: ServerProcess, pair: Pair, reference: list[Got]) -> None:
    assert reference
    for server in (unified, pair.prefill, pair.decode):
        assert_nothing_compiled_since_ready(server)


def test_colocated_equals_unified(
    start: Start, exact_flags: tuple[str, ...], requests: list[Asked], reference: list[Got]
) -> None:
    env = {"JAX_LOG_COMPILES": "1"}
    server = start("colocated", "--role", "colocated", "--local-prefill", "never", *exact_flags, env=env).wait_ready()
    assert_same(requests, reference, run_all(server.grpc, requests))
    assert server.metric("jdisagg_prefill_tokens_total", role="decode") == 0
    assert server.metric("jdisagg_transfer_bytes_total", backend="device_put") > 0
    assert_leaks_nothing(server, requests, server)
    assert_nothing_compiled_since_ready(server)


def test_colocated_engines_may_share_one_device(
    start: Start, exact_flags: tuple[str, ...], requests: list[Asked], reference: list[Got]
) -> None:
    flags = ("--role", "colocated", "--devices", "0", "--local-prefill", "never", *exact_flags)
    server = start("colocated-shared", *flags).wait_ready()
    assert_same(requests, reference, run_all(server.grpc, requests))
    assert server.metric("jdisagg_prefill_tokens_total", role="decode") == 0
    assert server.metric("jdisagg_transfer_bytes_total", backend="device_put") > 0

    def lives_and_ends() -> tuple[float, float]:
        return server.metric("jdisagg_request_seconds_count"), server.metric("jdisagg_requests_finished_total")

    wait_until(lambda: lives_and_ends()[0] == lives_and_ends()[1] > 0, 30, "each life is observed once", lives_and_ends)
