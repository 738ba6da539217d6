"""A hand-off whose request has a grammar: P's engine takes no time for it, and D asks nobody who cannot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from typing import Any

from jdisagg.api import channels
from jdisagg.api.peer.codec import encode_down
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import RequestError
from jdisagg.core.requests import ALL_GRAMMARS, Grammar, GrammarKind, SamplingParams
from jdisagg.handoff.events import PeerAlive, PeerOpened
from jdisagg.handoff.messages import Accepted, Grant, HandoffId, Open, Refused, StreamEnded
from jdisagg.v1 import peer_pb2_grpc
from tests.unit.wire.peers import H1, H2, Decode, Prefill, lost
from tests.unit.wire.rig import FAST, identity, request, run_quiet, until

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
STEADY = replace(FAST, dead_after_s=1.5)  # of who is not to die on a machine that gives nobody a core for a while


class SlowGrammars:
    """They are compiled when the test says so."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[Grammar] = []
        self.under_way = 0

    async def ahead(self, grammar: Grammar) -> None:
        self.asked.append(grammar)
        self.under_way += 1
        try:
            await self.go.wait()
        finally:
            self.under_way -= 1


def opening(request_id: str = "r", grammar: Grammar | None = GRAMMAR) -> Open:
    sampling = SamplingParams(max_tokens=8, grammar=grammar)
    return Open(request=request(request_id, sampling=sampling), held_tokens=1, backend="grpc")


def prefill(grammars: Any, config: TransferConfig = FAST, **who: Any) -> Prefill:
    p = Prefill(identity(grammars=ALL_GRAMMARS, **who), config)
    p.service._grammars = grammars
    return p


class NoGrammars:
    """None can be compiled."""

    async def ahead(self, grammar: Grammar) -> None:
        raise RequestError(f"{grammar.text}: no memory")


async def stop(p: Prefill, d: Decode) -> None:
    await d.client.aclose()
    await p.server.stop(0)


def test_p_compiles_first_and_both_hear_each_other_meanwhile() -> None:
    async def body() -> None:
        grammars = SlowGrammars()
        p, d = prefill(grammars), Decode()
        d.client.open(await p.start(), H1, opening())
        down = [Grant(credit_bytes=10), Grant(credit_bytes=20)]
        for message in down:
            d.client.send(H1, message)
        await until(lambda: grammars.asked)
        assert p.service.num_streams == 1, "who waits for it to end waits for this one"
        await asyncio.sleep(4 * FAST.dead_after_s)
        assert p.events == []
        assert d.messages(H1) == []
        grammars.go.set()
        await until(lambda: len(p.messages()) == 2)
        kinds = [type(event) for event in p.events if not isinstance(event, PeerAlive)]
        assert kinds[0] is PeerOpened
        assert p.messages() == down
        (opened,) = p.opened()
        assert opened.message.request.sampling.grammar == GRAMMAR
        opened.reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H1) == [Accepted(cached_tokens=0)])
        assert d.pulse(H1) == []
        assert d.client.failures() == {opened_by(d): ""}
        assert grammars.asked == [GRAMMAR]
        d.client.close(H1)
        await until(p.ends)
        assert p.ends() == ["closed"]
        await stop(p, d)

    run_quiet(body())


def test_a_grammar_that_cannot_be_compiled_is_refused_at_once_and_nothing_is_left() -> None:
    async def body() -> None:
        p, d = prefill(NoGrammars()), Decode()
        d.client.open(await p.start(), H1, opening())
        d.client.send(H1, Grant(credit_bytes=10))
        await until(lambda: d.messages(H1))
        refused = d.messages(H1)[0]
        assert isinstance(refused, Refused)
        assert refused.error.message == "a+: no memory"
        d.client.close(H1)
        await until(lambda: p.service.num_streams == 0)
        assert p.events == [], "its engine hears nothing of it"
        await stop(p, d)

    run_quiet(body())


def opened_by(d: Decode) -> str:
    (peer,) = d.client.failures()
    return peer


def test_other_streams_of_a_pair_go_on_while_many_wait_for_a_grammar() -> None:
    async def body() -> None:
        grammars = SlowGrammars()
        p, d = prefill(grammars), Decode()
        address = await p.start()
        d.client.open(address, H1, opening(grammar=None))
        await until(p.opened)
        assert grammars.asked == []
        slow = [HandoffId(f"s{number}", 1) for number in range(30)]
        for handoff in slow:
            d.client.open(address, handoff, opening(handoff.request_id))
        await until(lambda: len(grammars.asked) == len(slow))
        await asyncio.sleep(4 * FAST.dead_after_s)
        assert (p.ends(), d.messages(H1)) == ([], []), "a heartbeat over any of them is one for all"
        assert len(p.opened()) == 1
        grammars.go.set()
        await until(lambda: len(p.opened()) == 1 + len(slow))
        await stop(p, d)

    run_quiet(body())


def test_a_d_that_goes_away_meanwhile_leaves_nothing() -> None:
    async def body() -> None:
        grammars = SlowGrammars()
        p, d = prefill(grammars), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        d.client.open(address, H2, opening())
        d.client.send(H1, Grant(credit_bytes=10))
        await until(lambda: len(grammars.asked) == 2)
        d.client.close(H1)  # in good order
        await until(lambda: p.service.num_streams == 1)
        await d.client.aclose()  # as good as none
        await until(lambda: (p.service.num_streams, grammars.under_way) == (0, 0))
        grammars.go.set()
        await asyncio.sleep(0.1)
        assert p.events == [], "neither a beginning nor an end"
        await p.server.stop(0)

    run_quiet(body())


def test_a_d_that_says_nothing_meanwhile_is_given_up() -> None:
    async def body() -> None:
        grammars = SlowGrammars()
        p = prefill(grammars)
        async with channels.open_channel(await p.start()) as channel:
            call = peer_pb2_grpc.PeerServiceStub(channel).Prefill()
            await call.write(encode_down(opening(), epoch=identity().epoch, now_s=monotonic()))  # and no heartbeat
            await until(lambda: grammars.asked)
            assert p.service.num_streams == 1
            await until(lambda: p.service.num_streams == 0)
            assert p.events == []
            await until(lambda: grammars.under_way == 0)
        await p.server.stop(0)

    run_quiet(body())


def test_a_p_without_grammars_is_not_asked_for_one_and_is_as_good_as_before_for_others() -> None:
    async def body() -> None:
        p, d = Prefill(identity(grammars=frozenset({GrammarKind.LARK}))), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(lambda: d.ends(H1))
        (ended,) = d.messages(H1)
        assert isinstance(ended, StreamEnded)
        assert ended.reason == "hello"
        assert str(ended.error) == f"prefill peer {address}: it does not serve regex grammars"
        assert p.events == []
        assert d.usable(address)
        assert not d.client.is_doubtful(address)
        assert not d.client.is_down(address)
        d.client.open(address, H2, opening(grammar=None))
        await until(p.opened)
        (opened,) = p.opened()
        assert opened.handoff.request_id == "r"
        opened.reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H2) == [Accepted(cached_tokens=0)])
        again = HandoffId("again", 1)
        d.client.open(address, again, opening())
        await until(lambda: d.ends(again))
        assert d.ends(H2) == []
        await stop(p, d)

    run_quiet(body())


def test_a_p_that_serves_grammars_since_it_started_again_is_asked() -> None:
    async def body() -> None:
        p, d = Prefill(identity(epoch="old", grammars=frozenset({GrammarKind.LARK}))), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(lambda: d.ends(H1))
        await p.server.stop(0)
        await lost(d, address)
        grammars = SlowGrammars()
        grammars.go.set()
        newer = prefill(grammars, epoch="new")
        await newer.start(int(address.rpartition(":")[2]))
        d.client.open(address, H2, opening())
        await until(lambda: newer.opened() or d.ends(H2))
        assert len(newer.opened()) == 1, d.messages(H2)
        await stop(newer, d)

    run_quiet(body())


def test_a_p_that_cannot_read_grammars_tells_its_engine_at_once() -> None:
    async def body() -> None:
        p, d = Prefill(replace(identity(), grammars=ALL_GRAMMARS)), Decode()  # it has none to compile: its engine refuses
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        assert p.opened()[0].message.request.sampling.grammar == GRAMMAR
        await stop(p, d)

    run_quiet(body())
