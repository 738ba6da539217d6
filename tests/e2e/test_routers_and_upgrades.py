"""Two routers over one fleet, the whole of a request replayed, and weights exchanged under load: nobody notices in a token."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.e2e.blows import assert_exact, assert_same, interrupt, long_requests, once, wait_all_free
from tests.e2e.client import OPTIONS, Asked, Got, generate, run_all
from tests.e2e.conftest import SMALL, Start, starting
from tests.e2e.fleets import LIMIT_S, Fleet, Load, num_known, num_whole, numbered, wait_forgotten, wait_streaming
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tiny_model import make_tiny_model
from tests.e2e.tries import fair


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Fleet]:
    with starting(tmp_path_factory.mktemp("routers")) as start:
        model = ("--model", str(tiny_model), "--served-model-name", "tiny")
        yield Fleet(start=start, model=model, flags=("--numerics", "exact", "--lease-s", "1", *SMALL)).begin(num_routers=2)


def test_a_worker_that_every_router_refuses_is_not_ready(fleet: Fleet, tiny_model: Path) -> None:
    """A rollout of such workers stops there; had it gone on, there would soon be none that serves."""
    routers = ",".join(router.grpc for router in fleet.routers)
    flags = ("--role", "unified", "--router", routers, "--model", str(tiny_model), "--served-model-name", "another", *SMALL)
    worker = fleet.start("another", *flags).wait_ready()
    refused = f"router {fleet.routers[0].grpc} does not take this worker: "
    wait_until(lambda: refused in worker.get("/ready")[1], LIMIT_S, "the worker knows")
    wait_until(lambda: worker.get("/ready")[0] == 503, LIMIT_S, "the worker is not ready")
    assert worker.get("/health")[0] == 200
    for server in (*fleet.routers, *fleet.decode):
        wait_until(lambda s=server: s.get("/ready")[0] == 200, LIMIT_S, "the others are")
    assert worker.stop() == 0, worker.tail()


@pytest.mark.covers("C19")
@pytest.mark.timeout(600)
def test_a_replay_is_exact_with_seeds_penalties_choices_and_logprobs(fleet: Fleet, unified: ServerProcess) -> None:
    requests = numbered("whole", 8, 180)
    wanted = run_all(unified.grpc, requests)
    router = fleet.routers[0]

    def begun(server: ServerProcess) -> bool:
        flights = [flight for flight in router.state()["flights"] if flight["worker"] == server.grpc]
        mine = any(flight["request_id"] == "whole-0/0" for flight in flights)
        return mine and all(flight["delivered"] for flight in flights)

    def kill_the_one_with_three_choices() -> None:
        found: list[ServerProcess] = []
        what = "every stream of the worker of whole-0/0 has tokens"
        once(lambda: found.extend(filter(begun, fleet.decode)) or found, what)
        victim = (*found, *fleet.decode)[0]
        victim.kill()
        fleet.decode.remove(victim)

    def struck(_: int) -> list[Got]:
        got = asyncio.run(interrupt(router.grpc, requests, 0.0, kill_the_one_with_three_choices))
        assert_same(requests, wanted, got)
        fleet.add("decode").wait_ready()
        fleet.wait_members()
        return got

    def replayed(got: list[Got]) -> list[int]:
        """Numbers of the requests of which a choice was."""
        ended = [(number, one.complete) for number, one in enumerate(got) if one.complete is not None]
        return [number for number, whole in ended if any("replay" in c.provenance.recoveries for c in whole.choices)]

    def too_few(got: list[Got]) -> bool:
        return 0 not in replayed(got) or all(number % 4 == 0 for number in replayed(got))

    got = fair(struck, too_few, "the streams had ended when the blow fell")
    print(f"\nreplayed: requests {replayed(got)} of 8")
    assert 0 in replayed(got), "penalties, a seed, logprobs and three choices"
    assert not too_few(got), "ten streams, five for each worker: two others at least, one of them of another kind"
    choices = sum("replay" in c.provenance.recoveries for one in got if one.complete for c in one.complete.choices)
    assert router.metric("jdisagg_recoveries_total", rung="replay") >= choices
    lines = [line for line in router.log_since_ready().splitlines() if "recovering by replay" in line]
    assert len(lines) >= choices
    assert all("stage " in line and "pid " in line and "request whole-" in line for line in lines)
    for worker in fleet.workers:
        wait_all_free(worker)


@pytest.mark.covers("X25", "C04")
@pytest.mark.timeout(600)
def test_a_router_that_dies_loses_its_own_streams_only_and_comes_back_knowing_the_fleet(
    fleet: Fleet, unified: ServerProcess
) -> None:
    b = fleet.routers[1]
    lost, kept = long_requests(10, seed=41, max_tokens=180), long_requests(6, seed=42, max_tokens=180)
    wanted = run_all(unified.grpc, kept)
    lost_ids = [asked.request_id for asked in lost]
    killed_s: list[float] = []
    ended_s: list[float] = []

    async def both(a: ServerProcess) -> tuple[list[Got], list[Got], float]:
        """What A's and B's clients got, and for how many requests more than these workers went on."""
        before = await asyncio.to_thread(num_whole, fleet)
        async with grpc.aio.insecure_channel(a.grpc, options=OPTIONS) as to_a, grpc.aio.insecure_channel(b.grpc) as to_b:

            async def on_a(asked: Asked) -> Got:
                got = await generate(to_a, asked)
                ended_s.append(time.monotonic())
                return got

            on_a_tasks = [asyncio.create_task(on_a(asked)) for asked in lost]
            await asyncio.to_thread(once, lambda: num_known(b) > 0, "B knows what A has given the workers")
            on_b_tasks = [asyncio.create_task(generate(to_b, asked)) for asked in kept]
            await asyncio.to_thread(wait_streaming, b, 1, on_b_tasks)
            killed_s.append(time.monotonic())
            a.kill()
            await asyncio.to_thread(wait_forgotten, fleet, lost_ids)
            whole = await asyncio.to_thread(num_whole, fleet) - before
            freed_s = time.monotonic() - killed_s[-1]
            print(f"\nworkers forgot the dead router's requests after {freed_s:.2f} s")
            got = await asyncio.wait_for(asyncio.gather(*on_a_tasks), LIMIT_S)
            ended = sum(one.error is None for one in got)  # before the blow
            return got, await asyncio.wait_for(asyncio.gather(*on_b_tasks), 60), whole - len(kept) - ended

    def died(_: int) -> tuple[list[grpc.aio.AioRpcError], float, float]:
        """What its clients were told whose streams were cut, what B recovered, and for how many requests workers went on."""
        a = fleet.routers[0]
        before = b.metric("jdisagg_recoveries_total")
        on_a, on_b, for_nobody = asyncio.run(both(a))
        assert max(ended_s) - killed_s[-1] < LIMIT_S
        assert_exact(on_b, wanted)
        recovered = b.metric("jdisagg_recoveries_total") - before
        for worker in fleet.workers:
            wait_all_free(worker)
        fleet.routers[0] = again = fleet.add_router(int(a.grpc.rpartition(":")[2]))
        seconds = fleet.wait_members(again)
        print(f"a restarted router knew its fleet {seconds:.2f} s after READY")
        assert seconds < LIMIT_S
        return [got.error for got in on_a if got.error is not None], recovered, for_nobody

    cut, recovered, for_nobody = fair(
        died,
        lambda found: not found[0] or found[1] or found[2] > 0,
        "its streams were at their end when the blow fell, or a worker stood still as well",
    )
    assert cut, "no stream of the dead router was running"
    assert recovered == 0
    assert for_nobody <= 0
    assert {error.code() for error in cut} == {grpc.StatusCode.UNAVAILABLE}
    assert_exact(run_all(fleet.routers[0].grpc, kept), wanted)


@pytest.mark.timeout(600)
def test_a_router_that_froze_goes_on_with_its_streams_when_it_wakes(fleet: Fleet, unified: ServerProcess) -> None:
    frozen, other = fleet.routers
    slept = long_requests(48, seed=51, max_tokens=180)  # more than the workers can finish before they notice
    awake = long_requests(4, seed=52, max_tokens=60)
    wanted, wanted_awake = run_all(unified.grpc, slept), run_all(unified.grpc, awake)
    recovered = other.metric("jdisagg_recoveries_total")

    async def body() -> list[Got]:
        async with grpc.aio.insecure_channel(frozen.grpc, options=OPTIONS) as channel:
            tasks = [asyncio.create_task(generate(channel, asked)) for asked in slept]
            await asyncio.to_thread(wait_streaming, frozen, 8, tasks)
            frozen.signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(wait_forgotten, fleet, [asked.request_id for asked in slept])
                got = await asyncio.to_thread(run_all, other.grpc, awake)
                assert_exact(got, wanted_awake)
                await asyncio.sleep(1.0)
            finally:
                frozen.signal(signal.SIGCONT)
            return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    got = asyncio.run(body())
    assert_exact(got, wanted)
    assert frozen.metric("jdisagg_recoveries_total", rung="replay") > 0
    assert (frozen.state()["quarantined"], other.metric("jdisagg_recoveries_total")) == (0, recovered)
    fleet.wait_members()
    for worker in fleet.workers:
        wait_all_free(worker)


@pytest.mark.covers("X25")
@pytest.mark.timeout(600)
def test_replacing_every_worker_by_one_of_other_weights_fails_nothing(
    fleet: Fleet, unified: ServerProcess, tmp_path: Path, start: Start
) -> None:
    weights = make_tiny_model(tmp_path / "new", seed=5)
    reference = start("new", "--role", "unified", "--numerics", "exact", "--model", str(weights), *SMALL).wait_ready()
    requests = numbered("up", 16, 40, seed=9)
    old, new = run_all(unified.grpc, requests), run_all(reference.grpc, requests)
    assert reference.stop() == 0
    assert all(one.essence() != other.essence() for one, other in zip(old, new, strict=True))
    outgoing = fleet.workers[::-1]  # decode workers, then the prefill worker
    with Load(fleet.routers[0].grpc, requests, at_once=4) as load:
        for role in ("prefill", "decode"):
            fleet.add(role, "--model", str(weights)).wait_ready()
        fleet.wait_members()
        half = len(load.got)

        def by_both() -> bool:
            return {is_new(one, old, new) for one in load.got[half + 8 :]} == {False, True}

        wait_until(lambda: len(load.got) >= half + 24 and by_both(), 120, "both halves of the fleet have served")
        for worker in outgoing:
            assert worker.stop() == 0, worker.tail()
            (fleet.prefill if worker in fleet.prefill else fleet.decode).remove(worker)
        fleet.wait_members()
        alone = len(load.got)
        wait_until(lambda: len(load.got) >= alone + 12, 120, "the new half has served alone")
        last = load.got[alone + 8 :]
    assert all(is_new(one, old, new) for one in last)
    num_new = sum(is_new(one, old, new) for one in load.got)
    print(f"\n{len(load.got)} requests while every worker was replaced: {num_new} by new weights, none failed or mixed")
    for worker in fleet.workers:
        wait_all_free(worker)
        assert worker.metric("jdisagg_prefill_tokens_total", role="decode") == 0


def is_new(one: tuple[int, Got], old: list[Got], new: list[Got]) -> bool:
    """Whether new weights answered, all choices of it; raises when it failed or is neither."""
    index, got = one
    assert got.error is None, got.error
    assert got.essence() in (old[index].essence(), new[index].essence())
    return got.essence() == new[index].essence()
