"""Which stream a hand-off gets next, and when there is none left to try.

    begin       the first stream; resume: the next one, after a pause
    lose        the stream failed: another P, a pause, a prefill here, or failure
    pass_over   P answers and has no room: another P, or the same after a pause
    place_free  a P that was full has begun with one of ours: whoever waits for it longest is offered to it
    fail        the request cannot be served

A new stream asks for what is missing beyond the KV in place.

A P that is quiet, but not yet dead, is doubted: its stream is set aside and another P is asked (a hedge). Who acts first has
the request: the quiet one by saying anything, or when all of its KV arrives; the other one by beginning to compute, or, if
the quiet one had something to show already, by having something, too. So a prompt moves at once to a P that has time for it,
and waits in no second queue.

    doubt       ask another P as well; late: because its KV does not come
    go_back     the quiet one is heard again
    move_on     the other one has it, or the quiet one is dead
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from weakref import WeakValueDictionary

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.errors import RequestError
from jdisagg.handoff import actions as act
from jdisagg.handoff.actions import DecodeAction
from jdisagg.handoff.credit import Credit, window_bytes_of
from jdisagg.handoff.full_peers import wait_s
from jdisagg.handoff.inbound import Doubted, Inbound
from jdisagg.handoff.inbound_stream import InboundStage, InboundStream
from jdisagg.handoff.ladder import FULL, is_invalid, is_unfit
from jdisagg.handoff.line import Inflow, Line
from jdisagg.handoff.live_inbound import LiveInbound
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.overdue import late_kv
from jdisagg.handoff.spans import GroupSpans

GIVE_UP = 3  # times as late as what another P is asked for
MOST_HEDGES = 32  # at a time: a P that is quiet for a moment must not have the next one drown in all of its prompts
MOST_BAD_LINES = 64  # remembered: workers that start again come back under new addresses


class Recovery:
    """Opens and replaces the streams of all hand-offs of one decode worker, which are `live`."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        chunk_bytes_per_token: int,
        backend: str,
        num_groups: int,
        head_shards: int,
        eos_token_ids: tuple[int, ...],
        live: LiveInbound,
    ) -> None:
        """As DecodeSide."""
        self._config = config
        self._window_bytes = window_bytes_of(config, chunk_bytes_per_token)
        self._backend = backend
        self._num_groups = num_groups
        self._head_shards = head_shards
        self._eos = eos_token_ids
        self._live = live
        self._serial = 0
        self._inflow = Inflow()
        self._hedging: list[Inbound] = []  # some may have ended
        self._lines = WeakValueDictionary[str, Line]()  # by peer; kept by their streams, ..
        self._bad_lines: dict[str, Line] = {}  # .. and those on which nothing comes

    def begin(self, record: Inbound, now_s: float) -> list[DecodeAction]:
        """The first stream."""
        peer = record.ladder.next_peer()
        return (
            self._open(record, peer, now_s) if peer else self._last_rungs(record, None, "no prefill worker is known to answer")
        )

    def resume(self, record: Inbound, now_s: float) -> list[DecodeAction]:
        """The pause is over."""
        self._live.full.drop(record.request.request_id)
        peer = record.ladder.resume(now_s)
        assert peer or record.ladder.after_pause(), f"request {record.request.request_id} waits for nobody"
        return self._open(record, peer, now_s) if peer else self._wait(record, now_s, had_begun=False)

    def asked(self, record: Inbound, stream: InboundStream) -> list[DecodeAction]:
        """Open leaves: its peer has its time to answer, from now on, if it did not leave before."""
        if stream.stage is InboundStage.OPENING:
            stream.move(InboundStage.ASKED)
        self._live.watch(record)
        return []

    def lose(
        self, record: Inbound, cause: str, now_s: float, error: RequestError | None = None, *, no_kv: bool = False
    ) -> list[DecodeAction]:
        """The stream failed, with `error` if its peer sent one: the next rung. `no_kv`: its peer may be well, its KV does not
        come."""
        assert record.stream is not None
        stream, lost = record.stream, record.stream.peer
        if no_kv:
            self._bad_lines[lost] = stream.line
        record.ladder.failed(lost, error)
        _look_for_room(record, now_s)
        if record.doubted is not None:
            return self._hedge_again(record, record.doubted, now_s)
        actions = record.hang_up()
        if no_kv:
            actions.append(act.NoKV(lost, cause))
        refused = is_unfit(error)
        if peer := record.ladder.next_or_new_peer():
            note = replace(record.note("other_prefill", stream, cause), refused=refused)
            return [*actions, note, *self._open(record, peer, now_s)]
        is_hopeless = no_kv and self._config.local_prefill is not LocalPrefill.NEVER  # it would not come the next time either
        if not is_hopeless and (later := record.ladder.after_pause()) is not None:
            rung = "reconnect" if later == lost else "other_prefill"
            return [*actions, record.note(rung, stream, cause), *self._wait(record, now_s, had_begun=stream.has_started)]
        return actions + self._last_rungs(record, stream, cause, refused=refused)

    def pass_over(self, record: Inbound, now_s: float, why: str = FULL, told_s: float = 0.0) -> list[DecodeAction]:
        """The peer answers and takes nothing now, as it is `why`: ask another, or the same after a pause. `told_s`: it says
        that there is no place before."""
        assert record.stream is not None
        left_s = record.request.deadline_s - now_s
        alone_s = wait_s(record.stream.handoff, max(told_s, record.ladder.pause_s), left_s) if why == FULL else 0.0
        record.ladder.busy(record.stream.peer, why, now_s + alone_s)
        if record.doubted is not None:
            return self._hedge_again(record, record.doubted, now_s)
        had_begun = record.stream.has_started
        actions = record.hang_up()
        peer = record.ladder.next_beside_full()
        return actions + (self._open(record, peer, now_s) if peer else self._wait(record, now_s, had_begun=had_begun))

    def place_free(self, peer: str, now_s: float) -> list[DecodeAction]:
        """One of ours has left the queue of `peer`: the next one waits there, and no longer here."""
        record = self._live.full.take_first(peer)
        if record is None:
            return []
        record.ladder.has_room(peer)
        return self._open(record, peer, now_s)

    def end(self, record: Inbound) -> list[DecodeAction]:
        """The hand-off is over."""
        self._live.forget(record.request.request_id)
        return record.hang_up()

    def _wait(self, record: Inbound, now_s: float, *, had_begun: bool) -> list[DecodeAction]:
        actions = record.wait(now_s, had_begun=had_begun)
        self._live.full.add(record)
        self._live.watch(record)
        return actions

    # --- hedges

    def doubt(self, record: Inbound, silent_s: float, now_s: float, *, no_kv: bool = False) -> list[DecodeAction]:
        """Ask another P while this one is quiet, or its KV does not come; nothing happens where there is none, nothing is owed,
        or as many as MOST_HEDGES are asked already."""
        if (peer := _another(record, now_s)) is None or not self._room_for_hedges():
            return []
        self._hedging.append(record)
        record.set_aside(silent_s, now_s, no_kv=no_kv)
        return self._open(record, peer, now_s)

    def doubt_more(self, now_s: float) -> list[DecodeAction]:
        """The same for those whose P is quiet still, as earlier hedges end."""
        actions: list[DecodeAction] = []
        quiet = (record for record in self._live.quiet() if _another(record, now_s) is not None)
        for record in itertools.islice(quiet, self._room_for_hedges()):
            assert record.stream is not None
            actions += self.doubt(record, record.stream.silent_s, now_s)
        return actions

    def _room_for_hedges(self) -> int:
        self._hedging = [record for record in self._hedging if record.doubted is not None]
        return MOST_HEDGES - len(self._hedging)

    def late(self, record: Inbound, now_s: float) -> list[DecodeAction]:
        """Nothing, unless KV is all that is missing and does not come: then another P is asked, and where there is none the
        rest is computed here, if it may be."""
        late_s = late_kv(record, now_s)
        if not late_s:
            return []
        if asked := self.doubt(record, late_s, now_s, no_kv=True):
            return asked
        if self._config.local_prefill is LocalPrefill.NEVER or not late_kv(record, now_s, patience=GIVE_UP):
            return []
        return self.lose(record, f"no KV came for {late_s:.3g} s", now_s, no_kv=True)

    def go_back(self, record: Inbound, now_s: float, outcome: str = "returned") -> list[DecodeAction]:
        """The doubted stream is gone on with, from where it was; the hedge is dropped."""
        hedge, doubted = record.stream, record.go_back()
        assert hedge is not None
        stream = doubted.stream
        stream.progress_s = min(now_s, stream.progress_s + now_s - doubted.since_s)  # nobody asked it for anything meanwhile
        stream.line.wait_anew(now_s)
        stream.silent_s = 0.0  # it is doubted anew when it is found quiet anew
        request_id = record.request.request_id
        self._live.watch(record)
        ended = act.Hedged(outcome, request_id, stream.peer, hedge.peer)
        actions = [*hedge.close(), ended]
        if stream.has_started:
            actions.append(act.PeerReady(request_id))
        return [*actions, *record.ask(now_s)]

    def move_on(self, record: Inbound, now_s: float, end: str = "", error: RequestError | None = None) -> list[DecodeAction]:
        """The doubted stream is given up for the hedge; `end`: why it ended, and the `error` its peer sent with that, else it
        may be asked again, should all fail."""
        doubted, hedge, record.doubted = record.doubted, record.stream, None
        assert doubted is not None
        assert hedge is not None
        quiet = doubted.stream
        if end:
            record.ladder.failed(quiet.peer, error)
        else:
            record.ladder.busy(quiet.peer, "quiet")
        why = f"{'no KV came' if doubted.no_kv else 'nothing heard'} for {doubted.silent_s:.3g} s"
        cause = f"{end or why}; {hedge.peer} was asked meanwhile"
        actions = quiet.close()
        if doubted.no_kv:
            self._bad_lines[quiet.peer] = quiet.line
            actions.append(act.NoKV(quiet.peer, cause))
        actions.append(record.note("other_prefill", quiet, cause))
        actions.append(act.Hedged("moved", record.request.request_id, quiet.peer, hedge.peer))
        return actions + (self.doubt(record, hedge.silent_s, now_s) if hedge.silent_s else [])

    def _hedge_again(self, record: Inbound, doubted: Doubted, now_s: float) -> list[DecodeAction]:
        """The hedge cannot help: the next one, or none."""
        hedge = record.stream
        assert hedge is not None
        peer = record.ladder.next_peer(but=doubted.stream.peer)
        if peer is None:
            record.ladder.ask_all_again()  # should the quiet one fall quiet again
            return self.go_back(record, now_s, "refused")
        return [*hedge.close(), *self._open(record, peer, now_s)]

    def fail(self, record: Inbound, error: RequestError) -> list[DecodeAction]:
        """End the hand-off, and its request with `error`."""
        return [*self.end(record), act.Fail(record.request.request_id, error)]

    def _open(self, record: Inbound, peer: str, now_s: float) -> list[DecodeAction]:
        self._serial += 1
        handoff = HandoffId(record.request.request_id, self._serial)
        spans, credit = (GroupSpans(self._num_groups), GroupSpans(self._num_groups)), Credit(self._window_bytes)
        record.stream = InboundStream(handoff, self._line(peer), now_s, *spans, credit, backends=(self._backend,))
        self._live.watch(record)
        message = record.opening(self._backend, self._head_shards, self._config.transfer_chunk_tokens, self._eos)
        return [act.OpenStream(handoff, peer, message), *record.grant()]

    def _line(self, peer: str) -> Line:
        """The peer's."""
        bad = [(name, line) for name, line in self._bad_lines.items() if line.stalls]
        self._bad_lines = dict(bad[-MOST_BAD_LINES:])
        return self._lines.setdefault(peer, Line(peer, self._inflow))

    def _last_rungs(
        self, record: Inbound, stream: InboundStream | None, cause: str, *, refused: bool = False
    ) -> list[DecodeAction]:
        request_id = record.request.request_id
        if self._config.local_prefill is not LocalPrefill.NEVER:
            note = replace(record.note("local_prefill", stream, cause), refused=refused)
            self._live.forget(request_id)
            return [note, act.ComputeLocally(request_id, record.held_tokens, record.arrived)]
        verdict = record.ladder.verdict
        if verdict is not None and is_invalid(verdict) and record.request.generated_token_ids:
            verdict = record.outgrown(verdict)
        return self.fail(record, verdict or record.lost(stream, cause))


def _look_for_room(record: Inbound, now_s: float) -> None:
    """A P that was full is asked again when its time is over, and at once by who is in the middle of an answer: none refuses
    that as full."""
    record.ladder.look_for_room(now_s if record.first is None else inf)


def _another(record: Inbound, now_s: float) -> str | None:
    """Whom to ask while its stream is doubted; None where there is nobody, nothing is owed, or somebody is asked already."""
    stream = record.stream
    if stream is None or record.doubted is not None or (stream.stage is InboundStage.COMPUTED and record.covered):
        return None
    _look_for_room(record, now_s)
    return record.ladder.next_peer(but=stream.peer)
