"""A request whose turn would come too late is refused when it comes: what would be computed for it is thrown away."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.replay import replay
from jdisagg.sched.forecast import FEW
from jdisagg.sched.retry import MAX_RETRY_S, MIN_RETRY_S
from tests.unit.sched.engine_fake import FAR_S, FakeEngine, request

STEP_S = 0.1
TIME_S = 4.0  # of each request


class Load:
    """A worker of two slots, on which a request takes three steps; `run` brings some with every step."""

    def __init__(self, role: Role = Role.UNIFIED, **config: Any) -> None:
        self.engine = FakeEngine(role, max_num_seqs=2, **config)
        self.num_sent = 0
        self.refused: list[Overloaded] = []

    def send(self, *, time_s: float = TIME_S, name: str = "", **options: Any) -> bool:
        """One more request; whether it was taken."""
        name, deadline_s = name or f"r{self.num_sent}", self.engine.now_s + time_s
        self.num_sent += 1
        try:
            prompt = (1, 2, 3, self.num_sent % 50)
            if self.engine.role is Role.DECODE:
                self.engine.scheduler.add(request(name, prompt, 3, deadline_s=deadline_s), self.engine.now_s, remote=True)
            else:
                self.engine.add(request(name, prompt, 3, deadline_s=deadline_s, **options))
        except Overloaded as error:
            self.refused.append(error)
            return False
        return True

    def run(self, num_steps: int, per_step: int = 0, **options: Any) -> None:
        for _ in range(num_steps):
            for _ in range(per_step):
                self.send(**options)
            self.engine.tick()
            self.engine.now_s += STEP_S

    @property
    def num_well(self) -> int:
        """Requests that got their whole answer."""
        return sum(seen.outputs[-1].finish is FinishReason.LENGTH for seen in self.engine.seen.values() if seen.outputs)


def overloaded(**config: Any) -> Load:
    """Whoever comes now and has no more time than the others is refused."""
    load = Load(**config)
    load.run(100, per_step=4, priority=5)
    while load.send(priority=5):
        pass
    return load


def test_goodput_does_not_fall_as_load_rises() -> None:
    loads = {per_step: Load() for per_step in (1, 4, 16)}
    for per_step, load in loads.items():
        load.run(300, per_step=per_step)
    well = {per_step: load.num_well for per_step, load in loads.items()}
    assert min(well.values()) > 0.85 * max(well.values()) > 100, well


def test_choices_that_wait_for_a_siblings_prompt_are_before_those_that_come_later() -> None:
    """Each of them takes a slot: by the groups alone the wait would seem a fourth of what it is."""
    single, groups = Load(), Load()
    single.run(300, per_step=4)
    for number in range(300):
        for choice in range(4):
            groups.num_sent = number  # for a prompt that all of the group share
            if not groups.send(fork_group=f"g{number}", name=f"g{number}/{choice}"):
                break
        groups.run(1)
    assert groups.num_well > 0.85 * single.num_well


def test_who_is_taken_gets_an_answer() -> None:
    load = Load()
    load.run(300, per_step=4)
    load.run(60)
    assert load.engine.scheduler.is_idle()
    assert load.num_well > 0.8 * (load.num_sent - len(load.refused))


def test_who_has_the_time_is_taken() -> None:
    load = overloaded()
    assert load.send(time_s=10 * TIME_S)
    assert load.send(time_s=FAR_S)


def test_who_is_refused_hears_when_to_come_again() -> None:
    load = Load()
    while not load.refused:
        load.run(1, per_step=4)
    before = len(load.refused)
    while load.refused[-1].retry_after_s < MAX_RETRY_S - 1.0:
        load.send()
    times = [error.retry_after_s for error in load.refused[before:]]
    assert times == sorted(set(times))  # one after the other, as places come free
    assert MIN_RETRY_S <= times[0] < MAX_RETRY_S / 2
    assert f"retry in {times[-1]:.1f} s" in load.refused[-1].message


def test_full_workers_share_out_who_comes_again() -> None:
    """Who is told to come again then is served as soon by several as by one, and they stand idle as little."""

    def served_after_s(num_workers: int) -> float:
        """All of five seconds of four times what they serve; who is refused comes again exactly when it is told."""
        loads = [Load() for _ in range(num_workers)]
        due = [(5.0 * number / (130 * num_workers), number) for number in range(130 * num_workers)]
        now_s = 0.0
        while due or not all(load.engine.scheduler.is_idle() for load in loads):
            assert now_s < 120.0
            while due and due[0][0] <= now_s:
                _, number = heapq.heappop(due)
                least_loaded = sorted(loads, key=lambda load: sum(load.engine.scheduler.counts().values()))
                if not any(load.send(num_asked=num_workers) for load in least_loaded):
                    heapq.heappush(due, (now_s + min(load.refused[-1].retry_after_s for load in loads), number))
            for load in loads:
                load.run(1)
            now_s += STEP_S
        return now_s

    alone_s = served_after_s(1)
    assert alone_s > 10.0
    assert served_after_s(3) < 1.1 * alone_s


def test_who_has_next_to_no_time_hears_of_the_deadline() -> None:
    times = list[float]()
    for num_hopeless in (0, 100):
        load = overloaded()
        assert not load.send(time_s=0.6, priority=5)
        for _ in range(num_hopeless):
            assert load.send(time_s=0.4, priority=5)
        assert not load.send(priority=5)
        times.append(load.refused[-1].retry_after_s)
    assert times[0] == times[1], "nobody else comes later for them"


def test_a_stream_that_goes_on_is_taken() -> None:
    assert overloaded().send(generated=(5,))


def test_who_goes_before_those_that_wait_is_taken() -> None:
    assert overloaded(scheduling_policy="priority").send(priority=0)


def test_a_prefill_worker_refuses_nobody() -> None:
    """Decode workers have counted the wait for it; they would ask it again and again."""
    load = Load(Role.PREFILL)
    load.run(100, per_step=4)
    assert not load.refused


@pytest.mark.parametrize("num_sent", [FEW, 200])
def test_a_burst_is_no_overload(num_sent: int) -> None:
    load = Load()
    for _ in range(30):  # it was busy before
        load.run(1, per_step=1)
        load.run(1)
    load.run(60)
    assert load.engine.scheduler.is_idle()
    load.run(1, per_step=num_sent)
    assert not load.refused


def test_a_rate_is_not_believed_for_longer_than_it_was_seen() -> None:
    load = Load()
    load.run(1, per_step=300, time_s=60.0)  # at the rate of the first steps they take 45 s
    load.run(30, per_step=1, time_s=60.0)
    assert not load.refused
    load.run(60, per_step=1, time_s=60.0)
    assert load.refused


def test_time_in_which_the_process_stood_still_says_nothing() -> None:
    load = Load()
    for _ in range(30):
        load.run(1, per_step=2, time_s=1000.0)
    load.engine.now_s += 300.0
    for _ in range(100):
        load.send(time_s=30.0)  # some 45 are before it, which takes 7 s
        load.run(2)
    assert not load.refused


def test_a_short_queue_takes_whoever_comes() -> None:
    load = Load()
    for _ in range(100):
        while load.engine.scheduler.counts()["waiting"] < FEW:
            assert load.send(time_s=1.0)
        load.run(1)


def test_a_decode_worker_counts_those_that_wait_for_their_peer() -> None:
    load = Load(Role.DECODE)
    for number in range(60):
        load.run(1, per_step=2)
        if (name := f"r{number}") in load.engine.scheduler.table.live:
            load.engine.scheduler.remote_first_token(name, Output(request_id=name, token_ids=(1,), finish=FinishReason.STOP))
    assert load.refused


def test_a_burst_beside_a_prompt_that_is_long_at_its_peer_is_no_overload() -> None:
    """What comes now and then is served as fast as it comes: that is no rate at which a queue would move."""
    load = Load(Role.DECODE)
    load.send(time_s=600.0)
    for number in range(1, 40):
        load.send(time_s=20.0)
        load.run(10)
        load.engine.scheduler.remote_first_token(
            f"r{number}", Output(request_id=f"r{number}", token_ids=(1,), finish=FinishReason.STOP)
        )
    load.run(1, per_step=40, time_s=20.0)
    assert not load.refused


def test_a_queue_that_nobody_has_left_says_nothing() -> None:
    load = Load(Role.DECODE)
    load.run(100, per_step=1, time_s=20.0)  # its peer is not there
    assert not load.refused


class AtPeer(Load):
    """A decode worker with slots for all, whose peer computes one prompt after the other; what ends with its first token."""

    def __init__(self) -> None:
        super().__init__(Role.DECODE, max_queue_len=10_000)
        self.num_late = 0

    def wait(self, seconds: float, *, every_s: float = 0.0, per_s: float = 0.0, time_s: float = 120.0) -> None:
        """The peer computes a prompt `every_s`, if not 0, and `per_s` come."""
        scheduler = self.engine.scheduler
        began_s, num_served, num_before = self.engine.now_s, 0, self.num_sent
        while (passed_s := self.engine.now_s - began_s) < seconds:
            while self.num_sent - num_before < passed_s * per_s:
                self.send(time_s=time_s)
            self.num_late += sum(output.error is not None for output in scheduler.expire(self.engine.now_s))
            while every_s and passed_s - num_served * every_s >= every_s:
                num_served += 1
                if name := next(iter(scheduler.table.live), ""):
                    first = Output(request_id=name, token_ids=(1,), finish=FinishReason.STOP)
                    scheduler.remote_first_token(name, first)
            scheduler.schedule(self.engine.now_s)
            self.engine.now_s += 0.25


@pytest.mark.parametrize("every_s", [0.25, 4.5, 9.0])
def test_goodput_does_not_fall_however_few_are_served_in_a_minute(every_s: float) -> None:
    load = AtPeer()
    load.wait(400 * every_s, every_s=every_s, per_s=2 / every_s, time_s=25 * every_s)
    assert load.refused
    assert load.num_late < 20
    load.refused.clear()
    assert load.send(time_s=400 * every_s)


def test_how_slowly_a_queue_moved_says_nothing_once_few_have_waited_for_a_while() -> None:
    """They need not end: the queue was never empty."""
    load = AtPeer()
    load.wait(80.0, every_s=5.0, per_s=0.4, time_s=600.0)
    for name in list(load.engine.scheduler.table.live)[1:]:
        load.engine.scheduler.cancel(name)
    load.wait(40.0)
    load.wait(1.0, per_s=40.0, time_s=60.0)
    load.wait(3.0, every_s=0.25, per_s=4.0, time_s=60.0)
    assert not load.refused


def test_what_was_served_before_a_stall_counts_while_it_lasts() -> None:
    """By the latest few, and the time since, 50 requests would take as many minutes as they take seconds."""
    load = AtPeer()
    load.wait(1.0, per_s=50.0, time_s=600.0)
    load.wait(60.0, every_s=0.25, per_s=4.0, time_s=600.0)
    load.wait(45.0)
    load.wait(1.0, per_s=2.0, time_s=200.0)
    assert not load.refused
    load.wait(90.0)
    load.send(time_s=60.0)
    assert load.refused, "it has lasted long"


@pytest.mark.parametrize("num_waiting", [1, FEW])
def test_a_queue_that_nobody_leaves_for_hours_takes_no_memory(num_waiting: int) -> None:
    load = AtPeer()
    for _ in range(num_waiting):
        load.send(time_s=FAR_S)
    load.wait(2 * 3600.0)
    forecast = load.engine.scheduler._arrivals._forecast
    assert len(forecast._samples) <= 2402, "600 s of two or four in a second"
    load.send(time_s=1.0)
    assert not load.refused


def test_an_overload_that_comes_again_after_a_pause_replays_from_its_log(tmp_path: Path) -> None:
    load = Load(schedule_log=str(path := tmp_path / "log.jsonl"))
    for _ in range(2):
        load.run(60, per_step=4)
        load.run(100)
    load.engine.scheduler.close_log()
    with path.open() as lines:
        report = replay(lines)
    assert load.refused
    assert report.difference is None
