"""What clients must get and pages must hold, from the requests and the model's definition alone."""

from __future__ import annotations

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, NumericalError
from jdisagg.core.requests import EngineRequest, Role
from jdisagg.kv.prefix import PrefixIndex
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from tests.unit.sched.content_fake import Cell, chain
from tests.unit.sched.engine_fake import FakeEngine, Seen, expected

WRITTEN = {
    Status.RUNNING: lambda s: s.num_scheduled,
    Status.READY: lambda s: s.num_scheduled,
    Status.PUBLISHING: lambda s: s.num_computed,
    Status.TRANSFER: lambda s: s.holding.held_tokens,
    Status.PREALLOC: lambda s: s.holding.held_tokens,
}  # leading tokens whose KV is in the pages once the latest step is done; in any other state nobody has pages


class Truth:
    """Every request's tokens and their KV, computed once."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._index: PrefixIndex = engine.scheduler.table.pages._index
        self._new_tokens: dict[str, list[int]] = {}
        self._cells: dict[str, list[Cell]] = {}
        self._page_of_key: dict[bytes, list[Cell]] = {}
        self.lost: set[str] = set()  # whose peers died, and whom nothing else could serve

    def add(self, asked: EngineRequest) -> None:
        """A request was accepted."""
        whole = expected(asked.prompt_token_ids, asked.sampling.max_tokens, ignore_eos=asked.sampling.ignore_eos)
        new = whole[len(asked.generated_token_ids) :]
        self._new_tokens[asked.request_id] = new[:1] if self._engine.role is Role.PREFILL else new
        tokens = (*asked.prompt_token_ids, *whole)
        cells = self._cells[asked.request_id] = chain(tokens, asked.cache_salt)
        size = self._engine.device.pages.page_size
        for number, key in enumerate(self._index.keys(tokens, asked.cache_salt)):
            self._page_of_key[key] = cells[number * size : (number + 1) * size]

    def new_tokens(self, name: str) -> list[int]:
        """What its client gets, to the end."""
        return self._new_tokens[name]

    def check(self) -> None:
        """All that clients have got, all KV that the scheduler counts on, on the device and the host, and all it may find."""
        for name, seen in self._engine.seen.items():
            assert seen.tokens == self._new_tokens[name][: len(seen.tokens)], f"{name}: a wrong token"
        for sequence in self._engine.scheduler.table.live.values():
            self._check_pages(sequence)
            if num_tokens := sequence.wait.host_tokens:
                kept = self._engine.device.host.get(sequence.request_id)
                wanted = self._cells[sequence.request_id][:num_tokens]
                assert kept == wanted, f"{sequence.request_id}: host memory has {kept}, wanted {wanted}"
        device, in_flight = self._engine.device, {result.step_id for result in self._engine.in_flight}
        for key in self._index.indexed():
            (page,) = self._index.match_keys((key,))
            device.pages.expect((page,), self._page_of_key[key], device.pages.page_size)
            assert device.computed_by.get(page) not in in_flight, f"page {page} can be found before its step has committed"

    def check_usage(self, asked: EngineRequest, seen: Seen) -> None:
        """How much of a prompt was found is told at the start and the end, and that is the same."""
        told = [output.cached_tokens for output in seen.outputs]
        assert told[-1] <= len(asked.prompt_token_ids)
        assert {*told} <= {0, told[-1]}, f"{asked.request_id}: found {told} tokens"
        assert asked.generated_token_ids or told[0] == told[-1], f"{asked.request_id}: found {told} tokens"

    def check_error(self, asked: EngineRequest, seen: Seen) -> None:
        """A request that ended with an error had a reason of its own."""
        name, error = asked.request_id, seen.last.error
        reasons = {
            DeadlineExceeded: asked.deadline_s <= seen.last_s,
            HandoffLost: name in self.lost,
            NumericalError: name in self._engine.device.spoiled,
        }
        assert any(has_it and isinstance(error, kind) for kind, has_it in reasons.items()), (
            f"{name} failed for nothing: {error!r}"
        )

    def _check_pages(self, sequence: Sequence) -> None:
        held, device = sequence.holding.pages, self._engine.device
        if sequence.status not in WRITTEN:
            assert not held, f"{sequence.request_id} is {sequence.status.value} and holds pages {held}"
            return
        cells = self._cells[sequence.request_id]
        device.pages.expect(held, cells, min(WRITTEN[sequence.status](sequence), len(cells)))  # beyond its end there is junk
        if sequence.slot is not None:
            table = device.slots[sequence.slot].pages
            assert table == held, f"{sequence.request_id} holds pages {held}, its slot has {table}"
