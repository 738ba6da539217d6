"""int8 KV travels with its scales over every backend."""

from __future__ import annotations

import pytest

from tests.e2e.blows import assert_exact, long_requests, wait_all_free
from tests.e2e.client import Got, run_all
from tests.e2e.conftest import PATIENT, Start, starting

REQUESTS = long_requests(4, seed=44, max_tokens=12)


@pytest.fixture(scope="module")
def flags(exact_flags: tuple[str, ...]) -> tuple[str, ...]:
    return ("--kv-cache-dtype", "int8", "--no-enable-prefix-caching", *PATIENT, *exact_flags)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]) -> list[Got]:
    with starting(tmp_path_factory.mktemp("unified")) as start:
        return run_all(start("unified", "--role", "unified", *flags).wait_ready().grpc, REQUESTS)


@pytest.mark.parametrize("backend", ["shm", "jax"])
def test_int8_streams_are_exact_over_unlike_meshes(
    start: Start, backend: str, flags: tuple[str, ...], wanted: list[Got]
) -> None:
    moving = ("--kv-transfer-backend", backend, *flags)
    prefill = start("prefill", "--role", "prefill", "--tensor-parallel-size", "2", *moving).wait_ready()
    decode = start("decode", "--role", "decode", "--prefill", prefill.grpc, "--local-prefill", "never", *moving).wait_ready()
    assert_exact(run_all(decode.grpc, REQUESTS), wanted)
    moved = "jdisagg_transfer_bytes_total"
    assert decode.metric(moved) == decode.metric(moved, backend=backend) > 0
    assert decode.metric("jdisagg_compiles_after_ready_total") == 0
    for server in (prefill, decode):
        wait_all_free(server)
