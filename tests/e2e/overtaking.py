"""Who went before whom: read from a schedule log by running it again.

The bound of policy `priority`: a request gets memory after one that came later only when

(a) the later one ranks better: it came at most (difference in priority) x `priority_aging_s` after it; or
(b) it did not fit into the free pages, and then at most `max_bypass` requests of worse rank go before it in its whole life,
    none once it has lost its pages. Choices that fork from a sibling in memory count with their sibling.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import EngineRequest
from jdisagg.sched.log import LoggedScheduler
from jdisagg.sched.log_codec import decode, encode
from jdisagg.sched.plan import Plan
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status

WITHOUT_MEMORY = (Status.WAITING, Status.PREALLOC)
ROUNDING_S = 1e-6  # ranks are sums of floats


@dataclass(slots=True)
class Life:
    """One request's way to its memory."""

    request: EngineRequest
    added_s: float
    waited_s: float = 0.0  # until it first got memory
    num_passed: int = 0  # requests of worse rank that got memory while it lacked it
    num_passed_preempted: int = 0  # the same after it had lost its pages
    num_free_passes: int = 0  # the same while nobody held memory, so that somebody had to go
    num_passed_slot: int = 0  # the same by remote ones, which need no slot, while it waited for one
    num_slots_lost: int = 0  # slots that ones of worse rank with KV in place took while it waited for a slot


@dataclass(slots=True)
class Story:
    """What a whole log says."""

    lives: list[Life] = field(default_factory=list)
    plans: Counter[str] = field(default_factory=Counter)  # how many did what
    better: int = 0  # times a later request went first because it ranks better
    forks_past: int = 0  # times a choice forked past somebody who lacked memory
    broken: list[str] = field(default_factory=list)  # of (a)

    def text(self) -> str:
        """The figures, for people."""
        waits: dict[int, list[float]] = defaultdict(list)
        for life in self.lives:
            waits[life.request.priority].append(life.waited_s)
        longest = ", ".join(f"{priority}: {max(some):.2f} s" for priority, some in sorted(waits.items()))
        passed = max((life.num_passed for life in self.lives), default=0)
        by_count = dict(sorted(Counter(life.num_passed for life in self.lives).items()))
        free, slot, lost = (
            sum(getattr(life, name) for life in self.lives) for name in ("num_free_passes", "num_passed_slot", "num_slots_lost")
        )
        return (
            f"{len(self.lives)} engine requests; passed for memory at most {passed} times {by_count}; "
            f"passed by better rank {self.better}, by forks {self.forks_past}, with all memory free {free}, "
            f"by remote ones while slots were taken {slot}, slots lost to worse rank {lost}\n"
            f"  longest wait for memory by priority: {longest}\n  {dict(self.plans)}"
        )


def read_story(path: Path) -> Story:
    """Run the log again. Asserts on the way that every call gives what it gave."""
    reader = _Reader(path)
    for number, line in reader.lines:
        reader.take(number, line)
    return reader.story


class _Reader:
    """A scheduler fed from a log, watched between its calls."""

    def __init__(self, path: Path) -> None:
        self.lines = _lines(path)
        first = next(self.lines)[1]
        config: SchedulerConfig = decode(first["args"])[0]
        self._scheduler = LoggedScheduler(
            replace(config, schedule_log=None), **{key: decode(value) for key, value in first["kwargs"].items()}
        )
        self._aging_s = config.priority_aging_s
        self._lives: dict[str, Life] = {}  # of live requests
        self.story = Story()

    def take(self, number: int, line: dict[str, Any]) -> None:
        """Make one call."""
        call, args = line["call"], decode(line["args"])
        table = self._scheduler.table
        before = {s: s.status for s in table.live.values()} if call == "schedule" else {}
        bypassed = {s: s.num_bypassed for s in before}
        held = table.someone_holds_memory
        try:
            result = getattr(self._scheduler, call)(*args, **{key: decode(value) for key, value in line["kwargs"].items()})
        except Exception as error:  # noqa: BLE001 - compared with what was raised then
            assert line.get("raised") == type(error).__name__, f"line {number}: {error!r}"
            return
        assert encode(result) == line.get("result"), f"line {number}: {call} differs"
        if call == "add" and args[0].request_id in table.live:
            self._lives[args[0].request_id] = life = Life(args[0], args[1])
            self.story.lives.append(life)
        elif call == "schedule":
            self._count(result)
            self._watch(before, bypassed, held, args[0])

    def _count(self, plan: Plan) -> None:
        plans, stats = self.story.plans, self._scheduler.stats
        plans["plans"] += 1
        plans["multi-step"] += plan.num_steps > 1
        plans["offloads"] += len(plan.offload)
        plans["restores"] += len(plan.restore)
        plans["forks"], plans["lost pages"] = stats.forks, stats.preemptions + stats.retractions

    def _watch(self, before: dict[Sequence, Status], bypassed: dict[Sequence, int], held: bool, now_s: float) -> None:
        """Compare who got memory, or a slot, in this step with who did not."""
        moved = [s for s, status in before.items() if s.status is not status and s.status in (Status.RUNNING, Status.TRANSFER)]
        admitted = sorted((s for s in moved if before[s] in WITHOUT_MEMORY), key=lambda s: s.order)
        forked = [s for s in moved if before[s] is Status.FORKING]
        seated = [s for s in moved if before[s] is Status.READY]
        for sequence in (*admitted, *forked):
            life = self._lives[sequence.request_id]
            life.waited_s = life.waited_s or now_s - life.added_s
        if not moved:
            return
        for sequence, status in before.items():
            if sequence.status is not status or status not in WITHOUT_MEMORY:
                continue
            if status is Status.PREALLOC and not sequence.is_open:
                continue  # its peer has not begun with it
            life = self._lives[sequence.request_id]
            self._check_better(sequence, life, admitted)
            worse = [s for s in admitted if s.order > sequence.order]
            self.story.forks_past += sum(s.order > sequence.order for s in forked)
            had_to_go = not (held or forked) and bool(admitted) and admitted[0].order > sequence.order
            self._note(sequence, life, worse, sequence.num_bypassed - bypassed[sequence], had_to_go)
            if status is Status.WAITING and self._scheduler.table.slots.num_free == 0:
                life.num_slots_lost += sum(s.order > sequence.order for s in seated)

    def _note(self, sequence: Sequence, life: Life, worse: list[Sequence], counted: int, had_to_go: bool) -> None:
        """`counted`: as the scheduler did it; everybody else must have needed no slot while this one waits for one. `had_to_go`:
        nobody held memory when the first of `worse` got some."""
        passes = len(worse)
        if sequence.status is Status.WAITING:
            remote = sum(s.is_remote and s.status is Status.TRANSFER for s in worse)
            assert passes - remote <= counted <= passes, f"{sequence.request_id}: {counted} counted, {passes} passed it"
            life.num_passed_slot += passes - counted
        else:
            assert counted == passes, f"{sequence.request_id}: {counted} counted, {passes} passed it"
        if counted and had_to_go:
            life.num_free_passes += 1
            counted -= 1
        life.num_passed += counted
        life.num_passed_preempted += counted if sequence.was_preempted else 0

    def _check_better(self, sequence: Sequence, life: Life, admitted: list[Sequence]) -> None:
        for other in (s for s in admitted if s.order < sequence.order):
            later = self._lives[other.request_id]
            if later.added_s <= life.added_s:
                continue
            self.story.better += 1
            allowed_s = (life.request.priority - later.request.priority) * self._aging_s
            if later.added_s - life.added_s > allowed_s + ROUNDING_S:
                self.story.broken.append(f"{other.request_id} went before {sequence.request_id}, {allowed_s} s are allowed")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            yield number, json.loads(line)
