"""What operators do to a worker: HEAD /metrics, SIGUSR1, a hung engine, SIGTERM. The tests share one process, in order."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.v1 import generation_pb2_grpc
from tests.e2e.client import OPTIONS, Asked, Got, generate, run_all
from tests.e2e.conftest import PATIENT, Start, starting
from tests.e2e.processes import STOP_TIMEOUT_S, ServerProcess, wait_until
from tests.e2e.tries import fair

SERVICES = ("", "jdisagg.v1.GenerationService", "jdisagg.v1.WorkerService")
LIMIT_S = 30.0  # of what takes five seconds or less; the figures themselves are printed
STOOD_STILL = (
    "does not answer (DEADLINE_EXCEEDED)",  # said of a router that is there and slow; one that has ended refuses
    "this process stood still for",
)
SLOTS = 8  # of the shared flags: the other requests wait their turn
LONG = [
    Asked(
        prompt=tuple(range(20 + number, 40 + number)),
        sampling={"max_tokens": 220, "temperature": 0.0, "ignore_eos": True},
        request_id=f"drained-{number}",
    )
    for number in range(6 * SLOTS)  # seconds
]
LARGE = Asked(prompt=(20, 21, 22), n=SLOTS, sampling={"max_tokens": 220, "seed": 1, "ignore_eos": True, "logprobs": 20})
SLOW_S = 3.0  # longer than a server waits for calls that nobody waits for
SHORT = Asked(prompt=(20, 21, 22), sampling={"max_tokens": 2, "temperature": 0.0})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, exact_flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    with starting(tmp_path_factory.mktemp("signals")) as start:
        flags = ("--role", "unified", *exact_flags, "--drain-s", "100")
        yield start("unified", *flags, env={"JDISAGG_TEST_HOOKS": "1"}).wait_ready()


def is_serving(server: ServerProcess, service: str = "") -> bool:
    """What grpc.health.v1 says."""
    with grpc.insecure_channel(server.grpc, options=OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)  # pyright: ignore[reportAttributeAccessIssue]
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def states(text: str) -> list[dict[str, object]]:
    """The state lines of a log."""
    whole = text[: text.rfind("\n") + 1]  # the last line may still be written
    return [json.loads(line) for line in whole.splitlines() if line.startswith('{"event": "state"')]


def test_head_of_metrics(server: ServerProcess) -> None:
    with urllib.request.urlopen(urllib.request.Request(server.http + "/metrics", method="HEAD"), timeout=LIMIT_S) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert int(answer.headers["content-length"]) > 1000
        assert answer.read() == b""


def test_sigusr1_shows_stacks_and_state_and_disturbs_nobody(server: ServerProcess) -> None:
    def shown(number: int) -> str:
        server.signal(signal.SIGUSR1)
        wait_until(lambda: len(states(server.log_since_ready())) >= number, LIMIT_S, "state on stderr")
        return server.log_since_ready()

    text = fair(
        shown, lambda text: "scheduler" not in states(text)[-1], "the engine waits for a core, and does not answer", tries=5
    )
    assert "most recent call first" in text, "stacks of the threads"
    assert "engine_thread.py" in text
    state = states(text)[-1]
    assert state["pid"] == server.pid
    assert state["frozen_objects"] > 100_000, "what jax made is walked by every search for garbage"
    assert state["streams"] == []
    (got,) = run_all(server.grpc, [SHORT])
    assert got.error is None


def test_hung_engine_is_seen_by_http_and_grpc_and_may_come_back(server: ServerProcess) -> None:
    assert all(is_serving(server, service) for service in SERVICES)
    (before,) = run_all(server.grpc, [SHORT])
    server.signal(signal.SIGUSR2)
    frozen_s = time.monotonic()
    wait_until(lambda: server.get("/health")[0] == 503, LIMIT_S, "/health turns")
    http_s = time.monotonic() - frozen_s
    wait_until(lambda: not any(is_serving(server, service) for service in SERVICES), LIMIT_S, "gRPC health turns")
    print(f"\nhung engine: /health {http_s:.1f} s, grpc.health.v1 {time.monotonic() - frozen_s:.1f} s")
    assert "no tick" in server.get("/health")[1]
    assert server.get("/ready")[0] == 503
    assert server.metric("jdisagg_ready") == 0.0
    largest_s = fair(
        lambda _: _longest_wait_while_the_state_is_asked_for(server),
        lambda seconds: seconds >= 1.0,
        "a machine that stands still for a moment makes one of them late, a loop that waits all",
        tries=5,
    )
    print(f"/debug/state of a hung engine: another request waited at most {largest_s * 1e3:.0f} ms")
    assert largest_s < 1.0
    silent = "has not answered"
    num_silent = server.log_since_ready().count(silent)
    server.signal(signal.SIGUSR1)
    wait_until(lambda: server.log_since_ready().count(silent) > num_silent, LIMIT_S, "SIGUSR1 answers as well")

    server.signal(signal.SIGUSR2)
    wait_until(lambda: server.get("/ready")[0] == 200 and is_serving(server), LIMIT_S, "a thawed engine is healthy again")
    (after,) = run_all(server.grpc, [SHORT])
    assert server.metric("jdisagg_ready") == 1.0
    assert after.essence() == before.essence()
    assert after.error is None


def _longest_wait_while_the_state_is_asked_for(server: ServerProcess) -> float:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.state_now)
        largest_s = 0.0
        while not asked.done():
            began_s = time.monotonic()
            server.get("/health")
            largest_s = max(largest_s, time.monotonic() - began_s)
        state = asked.result()
    assert "has not answered" in str(state["error"])
    assert "in_flight" in state
    return largest_s


@pytest.mark.covers("H16")
def test_sigterm_lets_streams_finish_and_refuses_new_ones(server: ServerProcess) -> None:
    wanted = run_all(server.grpc, LONG)
    got, refused, serving = asyncio.run(asyncio.wait_for(_drained(server), 120))
    for one, other in zip(got, wanted, strict=True):
        assert one.error is None, one.error
        assert one.essence() == other.essence()
    assert refused.error is not None
    assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in (refused.error.details() or "")
    assert not serving
    assert server.process.wait(STOP_TIMEOUT_S) == 0


async def _drained(server: ServerProcess) -> tuple[list[Got], Got, bool]:
    """The streams, running and queued at SIGTERM, a request that came after it, and what health said then."""
    async with grpc.aio.insecure_channel(server.grpc, options=OPTIONS) as channel:
        streams = [asyncio.create_task(generate(channel, asked)) for asked in LONG]
        while len((await asyncio.to_thread(server.state))["streams"]) + sum(map(asyncio.Task.done, streams)) < len(LONG):
            await asyncio.sleep(0.01)
        server.signal(signal.SIGTERM)
        while serving := await asyncio.to_thread(is_serving, server):
            assert not all(stream.done() for stream in streams), "it still serves at the end of its streams"
            await asyncio.sleep(0.01)
        refused = await generate(channel, SHORT)
        assert not all(stream.done() for stream in streams), "streams are too short for this test"
        return list(await asyncio.gather(*streams)), refused, serving


@pytest.mark.covers("H16")
def test_what_slow_clients_have_not_read_at_sigterm_they_get(start: Start, exact_flags: tuple[str, ...]) -> None:
    """Its computation over, an answer lies in the process that its client talks to: a router, or the worker itself."""
    router = start("router", "--role", "router", "--model", exact_flags[1]).wait_ready()
    worker = start("unified", "--role", "unified", "--router", router.grpc, *exact_flags).wait_ready()
    wait_until(lambda: router.state()["members"], LIMIT_S, "the worker at the router")
    for server in (router, worker):
        with grpc.insecure_channel(server.grpc, options=(*OPTIONS, ("grpc.http2.bdp_probe", 0))) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(LARGE.message(), timeout=60)
            first = next(call)
            wait_until(lambda: not worker.state()["streams"], LIMIT_S, "the end of the computation")
            server.signal(signal.SIGTERM)
            time.sleep(SLOW_S)
            rest = list(call)
        assert rest[-1].WhichOneof("event") == "complete", f"cut off after {len(rest)} messages"
        assert sum(len(answer.delta.token_ids) for answer in (first, *rest)) == LARGE.n * 220
        assert server.process.wait(STOP_TIMEOUT_S) == 0


def trouble(text: str) -> list[str]:
    """Lines of a log at warning level and above, and lines that are no records at all (a traceback); a busy machine aside."""
    records = (line.split(" | ", 1)[-1] for line in text.splitlines())
    found = [line for line in records if line and not re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d I ", line)]
    return [line for line in found if not any(words in line for words in STOOD_STILL)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("streaming", [True, False])
def test_a_normal_end_of_a_local_fleet_says_nothing_at_warning_level(
    start: Start, exact_flags: tuple[str, ...], streaming: bool
) -> None:
    """With a stream that is let finish, and idle: no process takes the end of another for an outage."""
    flags = ("--role", "local", "--num-prefill", "2", *PATIENT, *exact_flags)

    def said(_: int) -> list[str]:
        fleet = start("local", *flags).wait_ready()
        if streaming:
            got = asyncio.run(asyncio.wait_for(_stopped_while_streaming(fleet), 120))
            assert got.error is None
            assert len(got.tokens[0]) == 150
            assert fleet.process.wait(STOP_TIMEOUT_S) == 0
        else:
            assert fleet.stop() == 0
        return trouble(fleet.log_since_ready())

    assert fair(said, list, "who waits for a core for seconds does not hear that another one ends") == []


async def _stopped_while_streaming(fleet: ServerProcess) -> Got:
    asked = Asked(prompt=tuple(range(20, 60)), sampling={"max_tokens": 150, "temperature": 0.0, "ignore_eos": True})
    async with grpc.aio.insecure_channel(fleet.grpc, options=OPTIONS) as channel:
        stream = asyncio.create_task(generate(channel, asked))
        while not (await asyncio.to_thread(fleet.state))["flights"] and not stream.done():
            await asyncio.sleep(0.01)
        fleet.signal(signal.SIGTERM)
        return await stream
