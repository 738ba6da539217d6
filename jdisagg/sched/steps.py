"""Steps that were planned and whose results have not been committed, and the draft of the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.sched.plan import Admit, HostCopy, PageAppend, PageCopy, Plan, PrefillChunk
from jdisagg.sched.sequence import Sequence


@dataclass(slots=True)
class Row:
    """What one slot does in one step. Valid at commit only while the sequence's epoch is still `epoch`. Never changed; not
    frozen, since that makes the construction of one per slot and step three times as slow."""

    sequence: Sequence
    epoch: int
    end: int  # tokens whose KV exists once the step is done
    num_samples: int  # tokens it gets of this step


@dataclass(slots=True)
class Draft:
    """A plan in the making. `budget` = query tokens left in this step, `reads` = tokens of KV it may still read."""

    budget: int
    reads: float
    num_steps: int = 1
    admit: list[Admit] = field(default_factory=list)
    appends: list[PageAppend] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    offload: list[HostCopy] = field(default_factory=list)
    restore: list[HostCopy] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    by_grammar: bool = False

    def undo(self, sequence: Sequence) -> None:
        """Take back what this step was going to do for a sequence that loses its pages: rows, budgets, table entries."""
        slot = sequence.slot
        if slot is None or (row := self.rows.pop(slot, None)) is None:
            return
        for chunk in [chunk for chunk in self.prefill if chunk.slot == slot]:
            self.prefill.remove(chunk)
            self.budget += len(chunk.token_ids)
        if slot in self.decode:
            self.decode.remove(slot)
            self.budget += 1
        self.reads += row.end
        self.appends = [append for append in self.appends if append.slot != slot]

    def freeze(self, step_id: int, evict: tuple[int, ...], num_lookahead: int, forget: tuple[str, ...]) -> Plan:
        """The plan as plain data."""
        return Plan(
            step_id=step_id,
            evict=evict,
            num_steps=self.num_steps,
            copies=tuple(self.copies),
            offload=tuple(self.offload),
            restore=tuple(self.restore),
            forget=forget,
            admit=tuple(self.admit),
            pages=tuple(self.appends),
            prefill=tuple(self.prefill),
            decode=tuple(self.decode),
            num_lookahead=num_lookahead,
            by_grammar=self.by_grammar,
        )


class StepsInFlight:
    """Rows of dispatched steps by step id; results of unknown steps are dropped."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, Row]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def next_id(self) -> int:
        """Id of the next step that is not empty."""
        return self._next_id

    def start(self, plan: Plan, rows: dict[int, Row]) -> None:
        """`plan` goes to the device; an empty one does not and leaves no trace."""
        if not plan.is_empty:
            self._rows[plan.step_id] = rows
            self._next_id += 1

    def row(self, step_id: int, slot: int) -> Row | None:
        """What a step in flight does in `slot`; None when its result there would be dropped."""
        row = self._rows.get(step_id, {}).get(slot)
        return row if row is not None and row.epoch == row.sequence.epoch else None

    def finish(self, step_id: int) -> dict[int, Row]:
        """The rows of a step whose results have come, once; empty when it is unknown."""
        return self._rows.pop(step_id, {})
