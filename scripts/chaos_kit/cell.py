"""One cell of the table: a request is brought into a state, a process is struck, and everybody is asked what became of it.

others and subject sent -> state seen in /debug/state -> blow -> hold undone -> subject ended -> survivors at rest -> healed
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

from chaos_kit.act import Act, Blow, Victim
from chaos_kit.choice import Choice
from chaos_kit.fleet import Fleet
from chaos_kit.leaks import at_rest
from chaos_kit.stages import SCENES, Stage
from chaos_kit.stream import LOST, Stream

LOST_WITH_ROUTER = "lost with its router"
TRIES = 5  # to be in time for a state
FELT = {(Stage.DECODING, Victim.DECODE), (Stage.D_MEMORY, Victim.PREFILL)}  # a blow that nobody notices came too late
Answers = Mapping[tuple[int, ...], Choice]  # by prompt


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What became of the request that was struck: exact, lost with its router, the name of an error, or of a flaw."""

    became: str = "not run"
    detail: str = ""
    gap_s: float | None = None
    delivered_before: int = 0  # tokens
    went_on: str = ""  # P that brought its KV > D that ended it, rungs


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What happened."""

    stage: str
    victim: str
    blow: str
    held_by: str
    reached: bool = False
    tries: int = TRIES
    seen: str = ""  # just before the blow
    struck: str = ""
    ending: Ending = Ending()
    others: dict[str, int] = field(default_factory=dict)  # how many of the other streams became what
    again: str = ""  # what the other router answered to the same question, where the first was killed
    leaks: tuple[str, ...] = ()
    at_rest_s: float = 0.0  # after the last stream ended

    @property
    def ok(self) -> bool:
        """As it must be: exact, or lost with the router that was killed; the state was reached; nothing leaks."""
        router_killed = self.victim == Victim.ROUTER.value and self.blow == Blow.KILL.value
        fine = {"exact", LOST_WITH_ROUTER} if router_killed else {"exact"}
        told = {self.ending.became, *self.others} <= fine and self.again in ("exact", "")
        return told and self.reached and not self.leaks

    def as_json(self) -> dict[str, Any]:
        """Everything, on one level."""
        everything = asdict(self)
        return everything | everything.pop("ending") | {"ok": self.ok}


class CellRunner:
    """Runs cells one after the other on one fleet."""

    def __init__(self, fleet: Fleet, answers: Answers) -> None:
        self._fleet = fleet
        self._answers = answers
        self._numbers = itertools.count()

    async def run(self, stage: Stage, victim: Victim, blow: Blow) -> Cell:
        """One cell, tried again with another request as long as the state went by unseen."""
        cell = Cell(stage=stage.value, victim=victim.value, blow=blow.value, held_by=SCENES[stage].means)
        for number in range(1, TRIES + 1):
            act = Act(self._fleet, SCENES[stage], next(self._numbers))
            try:
                seen = await act.bring_about()
                if seen is None:
                    continue
                await act.strike(victim, blow)
                act.let_go()
                await act.until_ended()
                if _came_late(stage, victim, blow, act.subject):
                    continue  # the state had gone by before the blow fell: every token, or all of its KV, had left the victim
                return await self._told(replace(cell, reached=True, tries=number, seen=seen.text()), act)
            finally:
                act.let_go()
                await act.heal()
        return cell

    async def _told(self, cell: Cell, act: Act) -> Cell:
        subject, struck = act.subject, act.struck
        assert struck is not None, "nobody was struck"
        began_s = monotonic()
        leaks = await at_rest([member for member in self._fleet.members if member.up and not member.frozen])
        at_rest_s = monotonic() - began_s
        router_killed = cell.blow == Blow.KILL.value and cell.victim == Victim.ROUTER.value
        became, *fates = (
            LOST_WITH_ROUTER if fate == LOST and router_killed else fate
            for fate in (stream.became(self._answers[stream.entry.prompt]) for stream in (subject, *act.others))
        )
        been_at = (subject.provenance.prefill_worker, subject.provenance.decode_worker) if subject.provenance else ()
        return replace(
            cell,
            seen=cell.seen or f"client: {len(subject.tokens)} of {subject.entry.max_tokens} tokens",
            struck=struck.name,
            ending=Ending(
                became=became,
                detail=subject.detail[:200],
                gap_s=subject.gap_s(act.struck_s) if became == "exact" else None,
                delivered_before=sum(time_s <= act.struck_s for time_s in subject.times_s),
                went_on=f"{' > '.join(map(self._name, been_at))} {'+'.join(subject.recoveries)}".strip(),
            ),
            others=dict(Counter(sorted(fates))),
            again=await self._ask_again(subject) if router_killed else "",
            leaks=tuple(leaks),
            at_rest_s=at_rest_s,
        )

    def _name(self, worker: str) -> str:
        """The place of a worker that a provenance names by pid and address; it may have died since."""
        places = {member.proxy.port: member.name for member in self._fleet.workers if member.proxy is not None}
        return places.get(int(worker.rpartition(":")[2] or 0), worker or "-")

    async def _ask_again(self, lost: Stream) -> str:
        stream = await Stream(name=f"{lost.name}-again", entry=lost.entry).run(self._fleet.routers[1].grpc)
        return stream.became(self._answers[lost.entry.prompt])


def _came_late(stage: Stage, victim: Victim, blow: Blow, subject: Stream) -> bool:
    """Whether the blow fell after the state: nobody noticed it who would have."""
    if (stage, victim) in FELT:
        return not subject.recoveries
    return (victim, blow) == (Victim.ROUTER, Blow.KILL) and stage is not Stage.AFTER_LAST and subject.error is None
