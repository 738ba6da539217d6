"""int8 KV travels with its scales over every backend."""

from __future__ import annotations

import pytest

from tests.e2e.blows import assert_exact, long_requests, wait_all_free
from tests.e2e.client import run_all
from tests.e2e.conftest import Start


@pytest.mark.parametrize("backend", ["shm", "jax"])
def test_int8_streams_are_exact_over_unlike_meshes(start: Start, backend: str, exact_flags: tuple[str, ...]) -> None:
    flags = ("--kv-cache-dtype", "int8", "--no-enable-prefix-caching", *exact_flags)
    reference = start("unified", "--role", "unified", *flags)
    moving = ("--kv-transfer-backend", backend, *flags)
    prefill = start("prefill", "--role", "prefill", "--tensor-parallel-size", "2", *moving).wait_ready()
    decode = start("decode", "--role", "decode", "--prefill", prefill.grpc, "--local-prefill", "never", *moving).wait_ready()
    requests = long_requests(4, seed=44, max_tokens=12)
    assert_exact(run_all(decode.grpc, requests), run_all(reference.wait_ready().grpc, requests))
    moved = "jdisagg_transfer_bytes_total"
    assert decode.metric(moved) == decode.metric(moved, backend=backend) > 0
    assert decode.metric("jdisagg_compiles_after_ready_total") == 0
    for server in (prefill, decode):
        wait_all_free(server)
