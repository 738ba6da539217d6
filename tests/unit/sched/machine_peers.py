"""The machine of a worker that has peers: a decode worker fetches KV, a prefill worker's computed prompts are fetched."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role
from jdisagg.sched.plan import PageTable
from jdisagg.sched.states import Status
from tests.unit.sched.content_fake import EOS, next_token
from tests.unit.sched.machine_rules import WorkerMachine


@dataclass
class Fetch:
    """A hand-off as its peer sees it."""

    tokens: tuple[int, ...]
    page_table: PageTable | None = None
    held_tokens: int = 0
    has_first: bool = False


class DecodeMachine(WorkerMachine):
    """A decode worker, its clients and its peers."""

    role = Role.DECODE

    def __init__(self) -> None:
        super().__init__()
        self._fetches: dict[str, Fetch] = {}

    @property
    def fetches(self) -> dict[str, Fetch]:
        """Hand-offs of live requests."""
        live = self.engine.scheduler.table.live if self._fetches else ()
        return {name: fetch for name, fetch in self._fetches.items() if name in live}

    def accepted(self, asked: EngineRequest, remote: bool) -> None:
        """The hand-off of a remote request begins, unless a sibling's will do."""
        name, scheduler = asked.request_id, self.engine.scheduler
        if remote and scheduler.awaits_peer(name):
            self._fetches[name] = Fetch(asked.token_ids, held_tokens=scheduler.held_tokens(name))

    def stepped(self) -> None:
        """Hand-offs learn what the plan did for them."""
        for reserved in self.engine.scheduler.take_reserved():
            fetch = self._fetches[reserved.request_id]
            assert (reserved.num_tokens, reserved.held_tokens) == (len(fetch.tokens), fetch.held_tokens)
            fetch.page_table = reserved.page_table
        for again in self.engine.scheduler.take_retracted():
            self._fetches[again.request_id] = Fetch(again.token_ids)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def first_token_arrives(self, data: st.DataObject) -> None:
        self.take_first(data.draw(st.sampled_from(sorted(self.fetches))))

    @precondition(lambda self: self.can_complete())
    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        self.take_kv(data.draw(st.sampled_from(self.can_complete())))

    @precondition(lambda self: self.can_complete(first=False))
    @rule()
    def peers_answer(self) -> None:
        for name in self.can_complete(first=False):
            self.take_first(name)
            if name in self.fetches:
                self.take_kv(name)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), fails=st.booleans())
    def peer_dies(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.fetches)))
        fetch = self._fetches.pop(name)
        if not fails:
            held = fetch.held_tokens
            if fetch.page_table is not None:
                held = data.draw(st.integers(held, len(fetch.tokens)))
                self._import(name, fetch, held)
            assert self.engine.scheduler.compute_locally(name, held)
            return
        self.truth.lost.add(name)
        output = self.engine.scheduler.fail(name, HandoffLost("lost"))
        assert output is not None
        self.engine.collect([output])

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), is_ready=st.sampled_from([True, True, False]))
    def peer_shakes_hands_or_is_lost(self, data: st.DataObject, is_ready: bool) -> None:
        self.engine.scheduler.peer_ready(data.draw(st.sampled_from(sorted(self.fetches))), is_ready)

    def take_first(self, name: str) -> None:
        """The peer's first token, or one of a second peer."""
        fetch, asked = self.fetches[name], self.requests[name]
        token = next_token(fetch.tokens)
        finish = None
        if not fetch.has_first:
            count = len(fetch.tokens) - len(asked.prompt_token_ids) + 1
            if token == EOS and not asked.sampling.ignore_eos:
                finish = FinishReason.STOP
            elif count == asked.sampling.max_tokens:
                finish = FinishReason.LENGTH
        first = Output(request_id=name, token_ids=(token,), finish=finish)
        output = self.engine.scheduler.remote_first_token(name, first)
        assert output.token_ids == (() if fetch.has_first else (token,))
        self.engine.collect([output])
        fetch.has_first = True
        if finish is not None:
            del self._fetches[name]

    def take_kv(self, name: str) -> None:
        """The rest of the KV comes."""
        fetch = self._fetches.pop(name)
        self._import(name, fetch, len(fetch.tokens))
        self.engine.scheduler.kv_arrived(name)

    def _import(self, name: str, fetch: Fetch, end: int) -> None:
        assert fetch.page_table is not None
        salt = self.requests[name].cache_salt
        self.engine.device.import_tokens(fetch.page_table, fetch.tokens, fetch.held_tokens, end, salt)

    def can_complete(self, *, first: bool = True) -> list[str]:
        """Fetches that have pages and, with `first`, their first token."""
        return sorted(n for n, f in self.fetches.items() if f.page_table is not None and (f.has_first or not first))

    def serve_once(self) -> None:
        """Everybody does what he can, once."""
        for name in self.fetches:
            self.engine.scheduler.peer_ready(name)
        super().serve_once()
        self.peers_answer()


class PrefillMachine(WorkerMachine):
    """The same for a prefill worker, whose computed prompts wait for those who want them and may have to give way."""

    role = Role.PREFILL

    @precondition(lambda self: self._in_status(Status.PUBLISHING))
    @rule(data=st.data())
    def gives_way(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self._in_status(Status.PUBLISHING)), min_size=1, unique=True))
        live = self.engine.scheduler.table.live
        can = [name for name in names if self.engine.seen[name].last.finish is None]
        parked = self.engine.scheduler.park(tuple(names))
        assert parked == max(can, key=lambda name: live[name].order, default=None)
        if parked is not None:
            del self.engine.seen[parked]  # its token comes again

    @precondition(lambda self: self._in_status(Status.PARKED))
    @rule(data=st.data())
    def receiver_has_memory(self, data: st.DataObject) -> None:
        self.engine.scheduler.unpark(data.draw(st.sampled_from(self._in_status(Status.PARKED))))

    def serve_once(self) -> None:
        """Everybody does what he can, once."""
        super().serve_once()
        for name in self._in_status(Status.PARKED):
            self.engine.scheduler.unpark(name)
        for name in self._in_status(Status.PUBLISHING):
            self.engine.scheduler.cancel(name)

    def _in_status(self, status: Status) -> list[str]:
        return [s.request_id for s in self.engine.scheduler.table.queues[status]] if hasattr(self, "engine") else []
