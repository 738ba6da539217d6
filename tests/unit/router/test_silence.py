"""Silence is weaker evidence against a request than a death: a host or network that pauses silences several workers at once."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.fleet import Load, Report
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry, RunStream
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_there
from jdisagg.router.usable import Wishes
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop
from tests.unit.wire.rig import FAST, member, run_quiet, until

LIMIT_S = 90.0


def decoders(*addresses: str, **fields: object) -> tuple[Fleet, list[Entry]]:
    """Linked at 0 and steady."""
    fleet = Fleet(dead_after_s=1.0, lease_s=10.0)
    for address in addresses:
        fleet.register(member(address=address, **fields), 0.0)
    for entry in fleet.entries():
        entry.stream = RunStream(0.0, steady_s=0.0)
    return fleet, fleet.entries()


async def mute_worker(router: Router) -> FakeWorker:
    """Alone in the fleet, linked, and from now on silent."""
    worker = FakeWorker((router.address,), config=FAST.__class__(heartbeat_s=20.0, dead_after_s=60.0))
    (worker,) = await fleet(worker, router=router)
    worker.engine.frozen = True
    return worker


def test_one_of_several_that_falls_silent_is_dead() -> None:
    fleet, (one, _) = decoders("a:1", "b:1")
    fleet.tell_quiet(one, True, 100.6)
    assert not fleet.waits(one, 1.0, 101.0)


@pytest.mark.parametrize(
    "other", [{"draining": True}, {"role": Role.PREFILL}, {"not_ready": "no usable prefill worker"}, {"needs_prefill": True}]
)
def test_whoever_cannot_go_on_with_its_requests_makes_nobody_dead(other: dict[str, object]) -> None:
    fleet, (one,) = decoders("a:1")
    fleet.register(member(address="b:1", **other), 0.0)
    fleet.entries()[1].stream = None if other.get("role") else RunStream(0.0, steady_s=0.0)
    fleet.tell_quiet(one, True, 100.6)
    assert fleet.waits(one, 1.0, 101.0)
    assert one.is_awaited


def test_all_that_fall_silent_at_once_are_waited_for_and_get_nothing_new() -> None:
    fleet, (one, two) = decoders("a:1", "b:1")
    for entry in (one, two):
        fleet.tell_quiet(entry, True, 100.6)
    assert fleet.choose(None, 100.7) is not None, "quiet ones are better than none"
    assert fleet.waits(one, 1.0, 101.0)
    assert fleet.waits(two, 1.0, 101.0)
    assert fleet.choose(None, 101.0) is None
    assert "is heard (d, d fell silent)" in fleet.usable(None).lacks
    assert count_there(fleet, Role.DECODE) == 0
    assert fleet.waits(one, 9.9, 109.9)
    assert not fleet.waits(one, 10.0, 110.0), "its worker has forgotten our requests"


def test_the_first_one_that_is_heard_again_gives_the_others_as_long_as_it_was_silent() -> None:
    fleet, (one, two) = decoders("a:1", "b:1")
    for entry in (one, two):
        fleet.tell_quiet(entry, True, 100.6)
    assert all(fleet.waits(entry, 1.0, 101.0) for entry in (one, two))
    fleet.tell_quiet(two, False, 103.0)  # it was silent from 100.0 on
    assert fleet.choose(None, 103.0) is two
    fleet.heartbeat("a:1", "e", Report(Load()), 105.8)  # over another connection, which came back before
    assert fleet.waits(one, 5.9, 105.9)
    assert not fleet.waits(one, 6.1, 106.1)
    fleet.tell_quiet(one, False, 105.0)
    assert not one.is_awaited


def test_a_worker_that_sends_heartbeats_has_a_broken_stream() -> None:
    fleet, (one,) = decoders("a:1")
    fleet.tell_quiet(one, True, 100.6)
    fleet.heartbeat("a:1", "e", Report(Load()), 100.8)
    assert not fleet.waits(one, 1.0, 101.0)
    assert not one.is_awaited


def test_a_quiet_worker_gets_what_nobody_else_can_take() -> None:
    fleet, (one, two) = decoders("a:1", "b:1")
    fleet.tell_quiet(one, True, 1.0)
    two.pending = 50
    assert fleet.choose(None, 1.0) is two
    assert fleet.choose(None, 1.0, wishes=Wishes(but_not=frozenset({"b:1"}))) is one


def test_another_short_pause_takes_no_time_from_the_others() -> None:
    fleet, (one, two) = decoders("a:1", "b:1")
    for entry in (one, two):
        fleet.tell_quiet(entry, True, 100.6)
    assert all(fleet.waits(entry, 1.0, 101.0) for entry in (one, two))
    fleet.tell_quiet(two, False, 104.0)
    fleet.tell_quiet(two, True, 104.6)
    fleet.tell_quiet(two, False, 104.7)
    assert fleet.waits(one, 7.9, 107.9)
    assert not fleet.waits(one, 8.1, 108.1)


@pytest.mark.parametrize(("again", "steady_s"), [(True, 106.0), (False, 104.5)])
def test_a_connection_that_is_made_anew_gives_others_time_to_come_back_and_a_new_worker_does_not(
    again: bool, steady_s: float
) -> None:
    fleet, (one, _) = decoders("a:1", "b:1")
    for entry in fleet.entries():
        fleet.tell_quiet(entry, True, 101.6)
    fleet.evict(102.0)
    one.stream, one.reach.had_stream = None, again
    fleet.link(one, 103.5)
    assert one.stream is not None
    assert one.stream.steady_s == steady_s


def test_workers_whose_streams_broke_are_gone_when_their_heartbeats_stop() -> None:
    fleet, entries = decoders("a:1", "b:1")
    for entry in entries:
        entry.stream = None
    assert len(fleet.evict(1.1)) == 2


def test_heartbeats_that_stop_everywhere_at_once_evict_nobody_before_the_lease_is_over() -> None:
    fleet = Fleet(dead_after_s=1.0, lease_s=10.0)
    for address in ("a:1", "b:1"):
        fleet.register(member(address=address, role=Role.PREFILL), 0.0)
    assert fleet.evict(2.0) == fleet.evict(2.5) == []
    fleet.heartbeat("b:1", "e", Report(Load()), 3.0)
    assert fleet.evict(3.0) == [], "others get as long: silence began at 1.0"
    fleet.heartbeat("b:1", "e", Report(Load()), 4.9)
    assert fleet.evict(4.9) == []
    assert [entry.member.address for entry in fleet.evict(5.1)] == ["a:1"]
    assert fleet.evict(14.8) == []
    assert [entry.member.address for entry in fleet.evict(15.0)] == ["b:1"], "a lease after it was heard"


def test_a_router_that_slept_holds_its_sleep_against_nobody_and_is_not_told_of_the_future() -> None:
    fleet = Fleet(dead_after_s=1.0)
    quiet = member(role=Role.PREFILL, address="quiet:1")
    fleet.register(quiet, 10.0)
    fleet.register(replace(quiet, address="heard:1"), 10.0)
    fleet.heartbeat("heard:1", "e", Report(Load()), 15.0)  # the first thing the router did when it woke up
    fleet.forgive(5.0, 15.1)
    assert [entry.last_seen_s for entry in fleet.entries()] == [15.0, 15.1]
    assert fleet.evict(16.0) == []
    assert len(fleet.evict(16.2)) == 2


def test_a_router_that_stood_still_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router().start()
        await asyncio.sleep(0.1)
        time.sleep(1.3)
        await until(lambda: "stood still" in caplog.text)
        await router.stop()
        told = re.findall(r"this process stood still for (\d+\.\d) s", caplog.text)
        assert max(float(seconds) for seconds in told) >= 1.2, "the machine may have stood still, too"

    run_quiet(body())


@pytest.mark.parametrize("num_silent", [2, 3])
def test_a_request_outlives_several_silences(num_silent: int) -> None:
    async def body() -> None:
        router = await Router().start()
        asked = ask("r1", left_s=LIMIT_S)
        worker = await mute_worker(router)
        task = asyncio.create_task(collect(router, asked))
        for number in range(num_silent):
            await until(lambda w=worker: w.engine.seen, 20.0)
            await until(lambda: router.linked() == 0, 20.0)  # noticed
            await worker.die()
            if number < num_silent - 1:
                worker = await mute_worker(router)
        heir = await FakeWorker((router.address,)).start()
        assert_whole(asked, await task)
        assert router.engine._replays.num_quarantined(time.monotonic()) == 0
        await stop(router, heir)

    run_quiet(body(), limit_s=LIMIT_S)


def test_silence_everywhere_ends_in_quarantine() -> None:
    async def body() -> None:
        router = await Router().start()
        worker = await mute_worker(router)
        task = asyncio.create_task(collect(router, ask("r1", left_s=LIMIT_S)))
        for number in range(4):
            await until(lambda w=worker: w.engine.seen, 20.0)
            await until(lambda: router.linked() == 0, 20.0)
            await worker.die()
            if number < 3:
                assert not task.done()
                worker = await mute_worker(router)
        end = (await task)[-1]
        assert isinstance(end.error, HandoffLost)
        assert "workers went down" in end.error.message
        assert "was lost: no heartbeat for --dead-after-s)" in end.error.message
        with pytest.raises(HandoffLost, match="quarantined for"):
            await collect(router, ask("r1"))
        await stop(router)

    run_quiet(body(), limit_s=LIMIT_S)


def test_workers_that_come_back_are_held_against_nobody() -> None:
    async def body() -> None:
        router = await Router().start()
        worker = await mute_worker(router)
        asked = ask("r1", left_s=LIMIT_S)
        task = asyncio.create_task(collect(router, asked))
        for attempt in range(1, 6):  # lost and back five times: two and a half deaths' worth of silence
            await until(lambda n=attempt: len(worker.engine.seen) >= n, 20.0)
        worker.engine.frozen = False
        heir = await FakeWorker((router.address,)).start()
        await worker.die()
        assert_whole(asked, await task)
        assert router.engine._replays.num_quarantined(time.monotonic()) == 0
        await stop(router, heir)

    run_quiet(body(), limit_s=LIMIT_S)


def test_a_worker_is_quiet_from_its_last_word_on_however_long_that_takes_to_notice() -> None:
    fleet = Fleet(dead_after_s=5.0, lease_s=30.0)
    fleet.register(member(address="a:1"), 0.0)
    (one,) = fleet.entries()
    one.stream = RunStream(0.0, steady_s=0.0)
    fleet.tell_quiet(one, True, 103.0)
    assert one.stream.quiet_s == pytest.approx(100.0)
    fleet.heartbeat("a:1", "e", Report(Load()), 102.5)
    assert not fleet.waits(one, 5.0, 105.0), "it sends heartbeats"


def test_a_connection_that_is_made_anew_while_everybody_is_heard_is_steady_after_dead_after() -> None:
    fleet = Fleet(dead_after_s=0.5, lease_s=30.0)
    fleet.register(member(address="a:1"), 100.0)
    (one,) = fleet.entries()
    for _ in range(2):
        fleet.link(one, 100.0)
        assert one.stream is not None
        assert one.stream.steady_s == 100.5


def test_a_stream_that_comes_back_is_not_the_first_one_however_many_others_broke_behind_it() -> None:
    fleet = Fleet(dead_after_s=1.0, lease_s=10.0)
    for address in ("a:1", "b:1"):
        fleet.register(member(address=address), 100.0)
    for entry in fleet.entries():
        fleet.link(entry, 100.0)
    for entry in fleet.entries():
        entry.stream = None
    fleet.evict(101.5)  # nobody is heard
    for entry in fleet.entries():
        fleet.link(entry, 104.0)
        assert entry.stream is not None
        assert entry.stream.steady_s == 107.5, "the other one may come back as much later"
