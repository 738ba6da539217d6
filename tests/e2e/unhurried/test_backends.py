"""Every transfer backend between two real processes: exact streams, a prefill worker that dies, a backend that fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.blows import FREE_S, assert_exact, kill_prefill_amid_handoffs, long_requests, wait_all_free
from tests.e2e.client import Asked, Got, run_all
from tests.e2e.conftest import PATIENT, Pair, Start, starting
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tries import fair

BACKENDS = ("grpc", "tcp", "shm", "jax")
MOVED = "jdisagg_transfer_bytes_total"


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def moving(backend: str, tmp_path_factory: pytest.TempPathFactory, exact_flags: tuple[str, ...]) -> Iterator[Pair]:
    """P over one device, D over two, both with one backend; KV comes from P or not at all."""
    with starting(tmp_path_factory.mktemp(backend)) as start:
        flags = ("--kv-transfer-backend", backend, "--no-enable-prefix-caching", *PATIENT, *exact_flags)
        prefill = start("prefill", "--role", "prefill", *flags).wait_ready()
        mine = ("--prefill", prefill.grpc, "--local-prefill", "never", "--tensor-parallel-size", "2")
        yield Pair(prefill, start("decode", "--role", "decode", *mine, *flags).wait_ready())


def assert_nothing_recovers(decode: ServerProcess, requests: list[Asked], wanted: list[Got]) -> None:
    """And every stream is exact."""

    def recovered(_: int) -> float:
        before = decode.metric("jdisagg_recoveries_total")
        assert_exact(run_all(decode.grpc, requests), wanted)
        return decode.metric("jdisagg_recoveries_total") - before

    assert fair(recovered, bool, "a P that stands still for a second or two makes D fetch once more") == 0


@pytest.mark.covers("P09")
def test_streams_are_exact_and_their_kv_came_over_this_backend_alone(
    moving: Pair, backend: str, unified: ServerProcess
) -> None:
    requests = long_requests(6, seed=41, max_tokens=24)
    wanted = run_all(unified.grpc, requests)
    assert_nothing_recovers(moving.decode, requests, wanted)
    assert moving.decode.metric(MOVED, backend=backend) > 0
    assert moving.decode.metric(MOVED) == moving.decode.metric(MOVED, backend=backend)
    for server in (moving.prefill, moving.decode):
        wait_all_free(server)
        assert server.metric("jdisagg_compiles_after_ready_total") == 0
    wait_until(lambda: moving.prefill.metric("jdisagg_published_bytes") == 0, FREE_S, "nothing is published any more")


@pytest.mark.covers("X14")
@pytest.mark.parametrize("killed", ["tcp", "shm", "jax"])
def test_a_prefill_worker_killed_while_it_sends_is_survived_exactly(
    start: Start, killed: str, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    flags = ("--kv-transfer-backend", killed, *exact_flags)
    requests = long_requests(40, seed=510, max_tokens=40)  # more than D has room for: the last ones are still at P
    wanted = run_all(unified.grpc, requests)
    decode = kill_prefill_amid_handoffs(start, flags, requests, wanted)
    assert decode.metric("jdisagg_recoveries_total", rung="local_prefill") > 0
    wait_all_free(decode)


@pytest.mark.covers("C08", "C19")
@pytest.mark.parametrize(("broken", "where"), [("shm", "fetch"), ("jax", "fetch"), ("jax", "publish")])
def test_a_backend_that_fails_is_left_for_grpc_on_the_same_worker_and_nothing_is_computed_again(
    start: Start, broken: str, where: str, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    """`publish`: P cannot offer a piece. `fetch`: D cannot get at what P offers."""
    env = {"JDISAGG_BROKEN_BACKEND": f"{where}:{broken}"}
    flags = ("--kv-transfer-backend", broken, "--no-enable-prefix-caching", *PATIENT, *exact_flags)
    options = {"env": env, "module": "tests.e2e.broken_serve"}
    prefill = start("prefill", "--role", "prefill", *flags, **options).wait_ready()
    mine = ("--prefill", prefill.grpc, "--local-prefill", "never")
    decode = start("decode", "--role", "decode", *mine, *flags, **options).wait_ready()
    requests = long_requests(4, seed=43, max_tokens=12)
    assert_exact(run_all(decode.grpc, requests), run_all(unified.grpc, requests))
    moved, falls = decode.metric(MOVED), "jdisagg_recoveries_total"
    assert moved == decode.metric(MOVED, backend="grpc") > 0
    failing = decode if where == "fetch" else prefill
    assert failing.metric(falls, rung="other_backend") == len(requests)
    assert decode.metric(falls, rung="other_prefill") + decode.metric(falls, rung="reconnect") == 0
    log = failing.log.read_text()
    assert f"request {requests[0].request_id}" in log
    assert f"over {broken}" in log
    assert "going on over grpc" in log
    prompts = sum(len(request.prompt) for request in requests)
    assert prefill.metric("jdisagg_prefill_tokens_total") - prompts < 16, "the self-test's prompt apart, computed once"
    for server in (prefill, decode):
        wait_all_free(server)
    wait_until(lambda: prefill.metric("jdisagg_published_bytes") == 0, FREE_S, "nothing is published any more")


@pytest.mark.covers("P09")
@pytest.mark.parametrize(("where", "backend"), [("other host", "tcp"), ("other host, closed", "grpc")])
def test_auto_is_tcp_between_hosts_and_grpc_where_its_port_is_not_reachable(
    start: Start, where: str, backend: str, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    flags = ("--no-enable-prefix-caching", *PATIENT, *exact_flags)
    options = {"env": {"JDISAGG_BROKEN_BACKEND": where}, "module": "tests.e2e.broken_serve"}
    prefill = start("prefill", "--role", "prefill", *flags, **options).wait_ready()
    mine = ("--prefill", prefill.grpc, "--local-prefill", "never")
    decode = start("decode", "--role", "decode", *mine, *flags, **options).wait_ready()
    requests = long_requests(4, seed=44, max_tokens=12)
    assert_nothing_recovers(decode, requests, run_all(unified.grpc, requests))
    assert decode.metric(MOVED) == decode.metric(MOVED, backend=backend) > 0
    log = decode.log.read_text()
    refused = "backend tcp is not reachable at 127.0.0.1:1 (Connection refused); KV comes over grpc"
    assert log.count(refused) == (backend == "grpc")
    assert log.count("KV comes over") == 1
    assert " tcp" not in prefill.log.read_text()
    for server in (prefill, decode):
        wait_all_free(server)
