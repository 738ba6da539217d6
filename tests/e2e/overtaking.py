"""Who went before whom: read from a schedule log by running it again.

The bound of policy `priority`: a request gets memory after one that came later only when

(a) the later one ranks better: it came at most (difference in priority) x `priority_aging_s` after it; or
(b) it did not fit into the free pages, or had no slot while the later one needs none yet, and then at most `max_bypass`
    requests of worse rank go before it in its whole life, none once it has lost its pages. Choices that fork from a sibling
    in memory count with their sibling;
(c) the later one goes on: its client had some of the answer when it came.

A free slot goes to one of worse rank only while the better one does not fit into the free pages.
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
    num_slots_lost: int = 0  # slots that ones of worse rank with KV in place took while it waited for pages and a slot


@dataclass(slots=True)
class Story:
    """What a whole log says."""

    lives: list[Life] = field(default_factory=list)
    plans: Counter[str] = field(default_factory=Counter)  # how many did what
    better: int = 0  # times a later request went first because it ranks better
    forks_past: int = 0  # times a choice forked past somebody who lacked memory
    broken: list[str] = field(default_factory=list)  # who went before whom without a right to

    def text(self) -> str:
        """The figures, for people."""
        waits: dict[int, list[float]] = defaultdict(list)
        for life in self.lives:
            waits[life.request.priority].append(life.waited_s)
        longest = ", ".join(f"{priority}: {max(some):.2f} s" for priority, some in sorted(waits.items()))
        passed = max((life.num_passed for life in self.lives), default=0)
        by_count = dict(sorted(Counter(life.num_passed for life in self.lives).items()))
        free, lost = sum(life.num_free_passes for life in self.lives), [life.num_slots_lost for life in self.lives]
        return (
            f"{len(self.lives)} engine requests; passed for memory at most {passed} times {by_count}; "
            f"passed by better rank {self.better}, by forks {self.forks_past}, with all memory free {free}, "
            f"slots lost for want of pages {sum(lost)}, at most {max(lost, default=0)}\n"
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
        bypassed = {s: s.wait.num_bypassed for s in before}
        held = table.someone_holds_memory
        try:
            result = getattr(self._scheduler, call)(*args, **{key: decode(value) for key, value in line["kwargs"].items()})
        except Exception as error:
            if line.get("raised") != type(error).__name__:
                raise
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
        with_memory = (Status.RUNNING, Status.TRANSFER, Status.READY)
        moved = [s for s, status in before.items() if s.status is not status and s.status in with_memory]
        admitted = sorted((s for s in moved if before[s] in WITHOUT_MEMORY), key=lambda s: s.order)
        forked = [s for s in moved if before[s] is Status.FORKING]
        seated = [s for s in moved if before[s] not in WITHOUT_MEMORY and s.status is Status.RUNNING]
        for sequence in (*admitted, *forked):
            life = self._lives[sequence.request_id]
            life.waited_s = life.waited_s or now_s - life.added_s
        if not moved:
            return
        for sequence, status in before.items():
            if sequence.status is not status or status not in WITHOUT_MEMORY:
                continue
            if status is Status.PREALLOC and not sequence.wait.is_open:
                continue  # its peer has not begun with it
            life = self._lives[sequence.request_id]
            self._check_better(sequence, life, admitted)
            worse = [s for s in admitted if s.order > sequence.order]
            self.story.forks_past += sum(s.order > sequence.order for s in forked)
            assert sequence.wait.num_bypassed - bypassed[sequence] == len(worse), f"{sequence.request_id}: passed by {worse}"
            had_to_go = bool(worse) and not (held or forked) and admitted[0].order > sequence.order
            life.num_free_passes += had_to_go
            life.num_passed += len(worse) - had_to_go
            life.num_passed_preempted += (len(worse) - had_to_go) if sequence.wait.was_preempted else 0
            if status is Status.WAITING and self._scheduler.table.slots.num_free == 0:
                self._check_slots(sequence, life, [s for s in seated if s.order > sequence.order], now_s)

    def _check_slots(self, sequence: Sequence, life: Life, seated: list[Sequence], now_s: float) -> None:
        """One that is first of all who need memory, and fits even after this step whatever it will get, fitted before."""
        life.num_slots_lost += len(seated)
        table = self._scheduler.table
        others = (s for status in (*WITHOUT_MEMORY, Status.FORKING) for s in table.queues[status] if s.order < sequence.order)
        needs = table.pages.pages_for(sequence.max_len)
        fits = needs <= table.pages.num_unpromised and not self._scheduler.preempted
        if seated and fits and next(others, None) is None:
            self.story.broken.append(f"{seated[0].request_id} took the slot of {sequence.request_id} at {now_s:.3f} s")

    def _check_better(self, sequence: Sequence, life: Life, admitted: list[Sequence]) -> None:
        for other in (s for s in admitted if s.order < sequence.order):
            later = self._lives[other.request_id]
            if later.added_s <= life.added_s or other.order[1] < 0:  # it goes on
                continue
            self.story.better += 1
            allowed_s = (life.request.priority - later.request.priority) * self._aging_s
            if later.added_s - life.added_s > allowed_s + ROUNDING_S:
                self.story.broken.append(f"{other.request_id} went before {sequence.request_id}, {allowed_s} s are allowed")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            yield number, json.loads(line)
