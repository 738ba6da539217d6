"""Fleets in which some serve grammars: a request that has one goes to those, whatever speaks for the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jdisagg.api.fleet.codec import decode_member, encode_member
from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import ALL_GRAMMARS, EngineRequest, Grammar, GrammarKind, Role, SamplingParams
from jdisagg.router.fleet import Fleet
from jdisagg.router.prefixes import NOWHERE, Near
from jdisagg.router.recovery import ReplayConfig
from jdisagg.router.usable import ANY_REQUEST, Needs, Wishes
from jdisagg.v1 import fleet_pb2
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import assert_whole, collect, fleet, stop
from tests.unit.wire.rig import member, request, run_quiet, until

NOW_S = 100.0
GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def ask(request_id: str, max_tokens: int = 40, grammar: Grammar | None = GRAMMAR, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar)
    return request(request_id, prompt=(int(request_id.strip("r")), 2, 3), sampling=sampling, **fields)


def of(**members: dict[str, Any]) -> Fleet:
    """Workers by name, all of them linked."""
    found = Fleet(dead_after_s=1.0)
    for name, fields in members.items():
        found.register(member(**{"max_model_len": 100} | fields, address=name, worker=name), NOW_S)
    for entry in found.entries():
        if entry.member.decodes:
            found.link(entry, NOW_S)
            found.tell_quiet(entry, False, NOW_S)
    return found


def chosen(found: Fleet, needs: Needs = ANY_REQUEST, **asked: Any) -> str | None:
    entry = found.choose(None, NOW_S, needs, Wishes(**asked))
    return None if entry is None else entry.member.address


BY_GRAMMAR = Needs(grammar=GrammarKind.REGEX)
WITH, WITHOUT = {"grammars": ALL_GRAMMARS}, {"grammars": frozenset({GrammarKind.LARK})}
DRAINING, NEEDS, P = {"draining": True}, {"needs_prefill": True}, {"role": Role.PREFILL}


def test_a_worker_is_chosen_that_serves_grammars_and_others_have_the_other_requests() -> None:
    found = of(plain=WITHOUT, able=WITH)
    assert chosen(found, BY_GRAMMAR) == "able"
    able = found.entries()[1]
    able.pending = 1000
    assert chosen(found, BY_GRAMMAR) == "able"
    assert chosen(found) == "plain"
    assert chosen(found, BY_GRAMMAR, home="plain", but_not=frozenset({"able"})) == "able"
    assert chosen(found, BY_GRAMMAR, near=Near(decodes={found.entries()[0].key: 10_000}, prefills={}, news=b"")) == "able"
    plain, grammars = found.usable(None), found.usable(None, BY_GRAMMAR)
    assert (len(plain.entries), len(grammars.entries)) == (2, 1)
    assert (plain.lacks, grammars.lacks) == ("", "")


LACKS = [
    ({}, "no decode or unified worker is connected"),
    ({"d": WITHOUT}, "no decode or unified worker that is connected serves regex grammars (d)"),
    (
        {"d": WITHOUT, "u": WITHOUT | {"role": Role.UNIFIED}},
        "no decode or unified worker that is connected serves regex grammars (d, u)",
    ),
    ({"d": WITHOUT, "p": WITH | P}, "no decode or unified worker that is connected serves regex grammars (d)"),
    ({"d": WITHOUT, "a": WITH | DRAINING}, "every decode or unified worker that serves regex grammars is draining (a)"),
    (
        {"d": WITHOUT | {"max_model_len": 500}, "a": WITH | {"max_model_len": 50}},
        "no decode or unified worker that is connected and serves regex grammars holds 60 tokens (at most 50)",
    ),
    (
        {"a": WITH | NEEDS, "p": WITHOUT | P},
        "no prefill worker that serves regex grammars and pairs with a (--local-prefill never)",
    ),
    (
        {"a": WITH | NEEDS, "p": WITH | P | DRAINING, "q": WITHOUT | P},
        "no prefill worker that serves regex grammars and pairs with a (--local-prefill never)",
    ),
    (
        {"a": WITH | NEEDS, "p": WITH | P | {"max_model_len": 5}, "q": WITHOUT | P},
        "no prefill worker that serves regex grammars holds 10 tokens (at most 5; --local-prefill never)",
    ),
    (
        {"a": WITH | DRAINING, "b": WITH | {"max_model_len": 50}, "d": WITHOUT},
        "every decode or unified worker that serves regex grammars and holds 60 tokens is draining (a)",
    ),
    ({"a": WITH | NEEDS, "p": WITH | P, "q": WITHOUT | P}, ""),
    ({"a": WITH, "p": WITHOUT | P}, ""),
    ({"a": WITH | NEEDS, "b": WITH, "p": WITHOUT | P}, ""),
]


@pytest.mark.parametrize(("members", "lacks"), LACKS)
def test_what_there_is_none_of_is_said_as_it_is(members: dict[str, dict[str, Any]], lacks: str) -> None:
    found, needs = of(**members), Needs(num_tokens=60, prefill_tokens=10, grammar=GrammarKind.REGEX)
    assert found.usable(None, needs).lacks == lacks
    assert (chosen(found, needs) is None) == bool(lacks)
    assert (not found.usable(None, needs).entries) == bool(lacks)


def test_without_a_grammar_nothing_is_said_of_them() -> None:
    for members in ({"a": WITHOUT | NEEDS}, {"a": WITHOUT | DRAINING}, {"a": WITHOUT | {"max_model_len": 5}}):
        lacks = of(**members).usable(None, Needs(num_tokens=60, prefill_tokens=10)).lacks
        assert lacks
        assert "grammar" not in lacks


def test_weights_whose_prefill_workers_serve_grammars_come_before_those_whose_do_not() -> None:
    found = of(
        d1=WITH | {"fingerprint": "one"},
        p1=WITHOUT | P | {"fingerprint": "one"},
        d2=WITH | {"fingerprint": "two"},
        p2=WITH | P | {"fingerprint": "two"},
    )
    d1, d2 = (entry for entry in found.entries() if entry.member.decodes)
    for busier, other in ((d1, d2), (d2, d1)):
        busier.pending, other.pending = 5, 0
        assert chosen(found, BY_GRAMMAR) == "d2"
        assert chosen(found) == other.member.address


def test_prefill_workers_are_named_that_serve_grammars_and_as_many_as_else() -> None:
    plain = {f"p{number}": WITHOUT | P for number in range(10)}
    found = of(**plain, able=WITH | P, short=WITH | P | {"max_model_len": 5})
    needs = Needs(prefill_tokens=10, grammar=GrammarKind.REGEX)
    assert [peer.member.address for peer in found.prefill_peers("f", needs, NOWHERE)] == ["able"]
    assert len(found.prefill_peers("f", Needs(prefill_tokens=10), NOWHERE)) > 1
    assert found.prefill_peers("other", needs, NOWHERE) == []


@pytest.mark.parametrize("grammars", [ALL_GRAMMARS, frozenset({GrammarKind.LARK}), frozenset()])
def test_a_worker_says_over_the_wire_which_grammars_it_serves(grammars: frozenset[GrammarKind]) -> None:
    described = member(grammars=grammars)
    said = encode_member(described)
    assert decode_member(said) == described
    newer = fleet_pb2.Member.FromString(said.SerializeToString())
    newer.identity.grammar_kinds.append(99)
    assert decode_member(newer) == described, "a kind that is not known here is none to ask for"


def test_a_worker_that_is_too_old_to_name_kinds_serves_the_first_ones_and_an_older_one_none() -> None:
    old = encode_member(member(grammars=ALL_GRAMMARS))
    old.identity.ClearField("grammar_kinds")
    assert decode_member(old).grammars == {GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK}
    old.identity.ClearField("grammars")
    assert decode_member(old).grammars == frozenset()


def test_a_replay_goes_to_a_worker_that_serves_grammars_and_takes_the_grammar_along() -> None:
    async def body() -> None:
        router = await Router().start()
        address = (router.address,)
        first, plain, second = (
            FakeWorker(address, grammars=ALL_GRAMMARS),
            FakeWorker(address),
            FakeWorker(address, grammars=ALL_GRAMMARS),
        )
        able, unable = FakeWorker(address, Role.PREFILL, grammars=ALL_GRAMMARS), FakeWorker(address, Role.PREFILL)
        await fleet(first, plain, second, able, unable, router=router)
        await until(lambda: len(router.engine.workers.members()) == 5)
        asked = [ask(f"r{number}", max_tokens=60) for number in range(4)]
        tasks = [asyncio.create_task(collect(router, one)) for one in asked]
        await until(lambda: first.engine.live and second.engine.live)
        await until(lambda: all(len(tokens) > 2 for _, _, tokens in first.engine.live.values()))
        await first.die()
        for one, task in zip(asked, tasks, strict=True):
            assert_whole(one, await task)
        assert plain.engine.seen == []
        seen = first.engine.seen + second.engine.seen
        assert len(seen) > len(asked)
        assert {request.sampling.grammar for request in seen} == {GRAMMAR}
        assert {request.prefill_peers for request in seen} == {(able.address,)}
        assert router.replays() > 0
        without = ask("r9", max_tokens=5, grammar=None)
        assert_whole(without, await collect(router, without))
        first.engine.live.clear()
        await stop(router, plain, second, able, unable)

    run_quiet(body())


def test_where_nobody_serves_grammars_the_client_is_told_so_and_a_stream_waits_for_one_that_does() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        plain, able = FakeWorker((router.address,)), FakeWorker((router.address,), grammars=ALL_GRAMMARS)
        await fleet(plain, able, router=router)
        task = asyncio.create_task(collect(router, asked := ask("r1", max_tokens=80)))
        await until(lambda: able.engine.live)
        await able.die()
        await until(lambda: router.linked() == 1)
        why = rf"that is connected serves regex grammars \(fake @ {plain.address}\); waited \d s: start"
        with pytest.raises(Unavailable, match=why):
            await collect(router, ask("r2"))
        assert router.engine.health().serves, "it serves all other requests"
        other = ask("r3", max_tokens=5, grammar=None)
        assert_whole(other, await collect(router, other))
        again = await FakeWorker((router.address,), grammars=ALL_GRAMMARS).start()
        assert_whole(asked, await task)
        assert [request.request_id for request in plain.engine.seen] == ["r3"]
        await stop(router, plain, again)

    run_quiet(body())
