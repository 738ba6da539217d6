"""Silence is noticed in time, by loops that wake up late too; a loop that slept through it does not blame the other side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from jdisagg.api import pulse
from jdisagg.api.pulse import Pulse


class Clock:
    """Sleeps at once, each time longer than asked by `late_s(now)`."""

    def __init__(self, late_s: Callable[[float], float]) -> None:
        self.now_s = 0.0
        self._late_s = late_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self._late_s(self.now_s)


def silence(
    monkeypatch: pytest.MonkeyPatch,
    late_s: Callable[[float], float],
    heard_at_s: float = -1.0,
    quiet: list[tuple[float, bool]] | None = None,
    waits: Callable[[float], bool] = lambda silent_s: False,
) -> tuple[float, list[float]]:
    """When silence is noticed, and the beats until then; something is heard once, at `heard_at_s`. Into `quiet`: when it was
    said that the other side is quiet, and that it is not."""
    clock, noted = Clock(late_s), [] if quiet is None else quiet
    one = Pulse(
        heartbeat_s=0.25, dead_after_s=1.0, on_quiet=lambda is_quiet: noted.append((clock.now_s, is_quiet)), waits=waits
    )
    beats: list[float] = []

    async def sleep(seconds: float) -> None:
        before_s = clock.now_s
        await clock.sleep(seconds)
        if before_s < heard_at_s <= clock.now_s:
            one.heard()

    monkeypatch.setattr(pulse, "monotonic", lambda: clock.now_s)
    with monkeypatch.context() as patched:
        patched.setattr(pulse.asyncio, "sleep", sleep)
        asyncio.run(one.run(lambda: beats.append(clock.now_s)))
    return clock.now_s, beats


@pytest.mark.parametrize("late_s", [0.0, 0.01, 0.03, 0.06])
def test_silence_is_noticed_on_time_by_a_loop_that_is(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    at_s, beats = silence(monkeypatch, lambda _: late_s)
    assert 1.0 <= at_s <= 1.0 + 1e-6 + 2 * late_s
    assert len(beats) >= 2


def test_silence_is_noticed_by_a_loop_that_is_always_late(monkeypatch: pytest.MonkeyPatch) -> None:
    at_s, _ = silence(monkeypatch, lambda _: 0.3)
    assert at_s <= 9 * 0.3625, "a wake-up counts for 125 ms"


def test_what_is_heard_starts_the_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    at_s, _ = silence(monkeypatch, lambda _: 0.0, heard_at_s=0.9)
    assert at_s == pytest.approx(0.9375 + 1.0)  # the wake-up after 0.9


@pytest.mark.parametrize("stopped_at_s", [0.1, 0.6, 0.97])
def test_a_process_that_was_stopped_reads_its_messages_before_it_blames_the_other_side(
    monkeypatch: pytest.MonkeyPatch, stopped_at_s: float
) -> None:
    stops = [30.0]

    def late_s(now_s: float) -> float:
        return stops.pop() if stops and now_s + 0.0625 > stopped_at_s else 0.0

    at_s, _ = silence(monkeypatch, late_s)
    assert at_s > 30.0 + stopped_at_s + 0.06, "it waited for another wake-up, by which messages have been read"
    assert at_s <= 31.2


@pytest.mark.parametrize("late_s", [0.0, 0.02, 0.1, 0.2, 0.4])
def test_a_late_loop_beats_at_most_one_turn_late(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    at_s, beats = silence(monkeypatch, lambda _: late_s)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *beats, at_s])]
    assert max(gaps) <= 0.25 + 0.0625 + late_s


def test_after_a_stop_the_next_beat_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = [0.7]
    _, beats = silence(monkeypatch, lambda now_s: stops.pop() if stops and now_s > 0.2 else 0.0)
    assert beats[0] <= 0.25 + 0.7 + 1e-6


def test_quiet_is_said_once_before_dead_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[tuple[float, bool]] = []
    silence(monkeypatch, lambda _: 0.0, heard_at_s=0.9, quiet=quiet)
    assert quiet == [(0.625, True), (0.9375, False), (0.9375 + 0.625, True)]


def test_a_process_that_was_stopped_calls_nobody_quiet_before_it_reads_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[tuple[float, bool]] = []
    stops = [30.0]
    silence(monkeypatch, lambda now_s: stops.pop() if stops and now_s > 0.5 else 0.0, heard_at_s=30.6, quiet=quiet)
    assert quiet[0][0] > 31.0


def test_who_is_waited_for_is_silent_for_longer_and_beaten_to_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def waits(silent_s: float) -> bool:
        asked.append(silent_s)
        return silent_s < 3.0

    at_s, beats = silence(monkeypatch, lambda _: 0.0, waits=waits)
    assert at_s == pytest.approx(3.0)
    assert (asked[0], len(beats)) == (pytest.approx(1.0), 12)
    assert asked == sorted(asked)


def test_who_is_waited_for_and_heard_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[tuple[float, bool]] = []
    silence(monkeypatch, lambda _: 0.0, heard_at_s=2.5, quiet=quiet, waits=lambda silent_s: silent_s < 2.0)
    assert quiet == [(0.625, True)], "it was dead before"
    quiet.clear()
    silence(monkeypatch, lambda _: 0.0, heard_at_s=1.5, quiet=quiet, waits=lambda silent_s: silent_s < 2.0)
    assert quiet == [(0.625, True), (1.5, False), (1.5 + 0.625, True)]


def test_a_loop_that_wakes_up_late_takes_no_silence_back(monkeypatch: pytest.MonkeyPatch) -> None:
    at_s, _ = silence(monkeypatch, lambda now_s: 5.0 if 1.4 < now_s < 1.6 else 0.0, waits=lambda silent_s: silent_s < 2.0)
    assert at_s == pytest.approx(7.0, abs=0.1), "the late one counts for 125 ms"
