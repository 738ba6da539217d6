"""Which prefill workers a decode worker asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from jdisagg.core.bits import UNLIKE_TOKENS
from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest, SamplingParams
from jdisagg.core.speed import Speed
from jdisagg.handoff.messages import HandoffId
from jdisagg.roles.peer_choice import PeerChoice


class Peers:
    """All well, but `down` and `doubtful`; of those that are `heard` it is known, of others nothing is. `unlike` ones compute
    other bits."""

    def __init__(
        self, *down: str, doubtful: tuple[str, ...] = (), heard: tuple[str, ...] = (), unlike: tuple[str, ...] = ()
    ) -> None:
        self._down = down
        self._unlike = unlike
        self._doubtful = doubtful
        self._heard = heard
        self.speeds: dict[str, Speed] = {}

    def is_down(self, peer: str) -> bool:
        return peer in self._down

    def is_doubtful(self, peer: str) -> bool:
        return peer in self._doubtful

    def is_unlike(self, peer: str) -> bool:
        return peer in self._unlike

    def speed(self, peer: str) -> Speed | None:
        return self.speeds.get(peer)

    def failures(self) -> dict[str, str]:
        return dict.fromkeys(self._heard, "") | dict.fromkeys(self._down, "down")


def choice(
    *down: str,
    doubtful: tuple[str, ...] = (),
    heard: tuple[str, ...] = (),
    unlike: tuple[str, ...] = (),
    policy: LocalPrefill = LocalPrefill.ON_FAILURE,
) -> PeerChoice:
    config = TransferConfig(local_prefill=policy, local_prefill_below_tokens=4)
    peers = Peers(*down, doubtful=doubtful, heard=heard, unlike=unlike)
    return PeerChoice(config, cast(Any, peers), lambda is_shunned: ("old", "new"))


def asked(*generated: int, peers: tuple[str, ...] = ("router's", "old")) -> EngineRequest:
    request = EngineRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9), deadline_s=1.0)
    return replace(request, generated_token_ids=generated, prefill_peers=peers)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (asked(), ("router's", "old")),
        (asked(peers=()), ("old", "new")),
        (asked(7), ("router's", "old", "new")),
    ],
)
def test_a_stream_that_has_begun_may_be_computed_by_who_has_come_since(
    request_: EngineRequest, wanted: tuple[str, ...]
) -> None:
    assert choice(heard=("router's",)).of(request_) == wanted


def test_whom_a_router_named_long_ago_and_nobody_has_heard_of_is_asked_after_those_that_are_there() -> None:
    """Prefill workers have come under new addresses since: each of the old ones would cost a stream that runs a second."""
    named = ("gone:1", "heard", "gone:2", "new")
    assert choice(heard=("heard",)).of(asked(7, peers=named)) == ("heard", "new", "old", "gone:1", "gone:2")
    assert choice(heard=("heard",)).of(asked(peers=named)) == named, "its router has just chosen them"
    doubtful, never = ("heard", "new"), LocalPrefill.NEVER
    peers = choice("old", "gone:2", heard=("heard",), doubtful=doubtful, policy=never)
    assert peers.of(asked(7, peers=named)) == ("gone:1", "heard", "new", "gone:2", "old")


def test_a_request_that_all_of_its_routers_list_were_full_for_may_ask_whoever_is_known_by_then() -> None:
    peers = choice("down", heard=("full",), policy=LocalPrefill.NEVER)
    named = asked(peers=("gone", "full", "down"))
    assert peers.later(named) == ("full", "old", "new", "gone"), "and who is down is no newcomer"
    peers.opened(HandoffId("a", 1), "old", 3)
    assert peers.later(named) == ("full", "new", "old", "gone")
    peers.opened(HandoffId("a", 2), "full", 9)
    assert peers.later(named) == ("full", "new", "old", "gone"), "its router has counted already"
    assert peers.later(asked(peers=())) == ("new", "old")


def test_who_computes_our_bits_is_asked_before_others_until_too_much_waits_there_for_us() -> None:
    peers = choice(unlike=("new",))
    peers.opened(HandoffId("a", 1), "old", UNLIKE_TOKENS)
    assert peers.of(asked(peers=())) == ("old", "new"), "as a router tells of them"
    peers.opened(HandoffId("a", 2), "old", 3)
    assert peers.of(asked(peers=())) == ("new", "old"), "one prompt more"
    long = replace(asked(peers=()), prompt_token_ids=tuple(range(UNLIKE_TOKENS + 1)))
    for prompt in (asked(peers=()), long):
        assert choice(unlike=("old",)).of(prompt) == ("new", "old"), "as --prefill has them"
    assert choice(heard=("p:1",), unlike=("p:1",)).of(asked(7, peers=("p:1",))) == ("p:1", "old", "new"), (
        "its router knows best"
    )
    assert choice(unlike=("new",), doubtful=("old",)).of(asked(peers=())) == ("new", "old"), "one whose KV comes, before that"


def test_who_is_down_is_not_asked_where_it_can_be_computed_here() -> None:
    assert choice("router's").of(asked(7)) == ("old", "new")


def test_where_all_that_a_router_names_are_down_those_known_here_are_asked() -> None:
    """They are idle, as nobody reaches them: a router that hears them names them first, every time."""
    named = asked(peers=("p:1", "p:2"))
    assert choice("p:1", "p:2").of(named) == ("old", "new")
    assert choice("p:1").of(named) == ("p:2",), "its router knows best"
    assert choice("p:1", "p:2", policy=LocalPrefill.NEVER).of(named) == ("old", "new", "p:1", "p:2")
    peers = choice("p:1", "p:2")
    peers.opened(HandoffId("a", 1), "old", 3)
    assert peers.of(named) == ("new", "old"), "no more than this prompt waits there"


def test_where_all_that_a_router_names_are_doubtful_those_known_here_are_asked_first() -> None:
    """Nobody's KV comes from there, and they are idle for it."""
    named = asked(peers=("p:1", "p:2"))
    assert choice(doubtful=("p:1", "p:2")).of(named) == ("old", "new", "p:1", "p:2")
    assert choice("p:2", doubtful=("p:1", "old")).of(named) == ("new", "p:1", "old")
    assert choice(doubtful=("p:1",)).of(named) == ("p:2", "p:1"), "its router knows best"


@pytest.mark.parametrize(
    ("policy", "down", "here"),
    [
        (LocalPrefill.ON_FAILURE, (), False),
        (LocalPrefill.ON_FAILURE, ("old", "new"), True),
        (LocalPrefill.NEVER, ("old", "new"), False),
    ],
)
def test_log_probabilities_of_a_prompt_are_computed_here_at_once_where_nobody_can_be_asked(
    policy: LocalPrefill, down: tuple[str, ...], here: bool
) -> None:
    plain = asked(peers=())
    scored = replace(plain, sampling=replace(plain.sampling, prompt_logprobs=0))
    assert choice(*down, policy=policy).is_here(scored) is here
    assert not choice(*down, policy=policy).is_here(plain), "it is asked for, and falls back then"


@pytest.mark.parametrize(("num_tokens", "here"), [(3, True), (4, False)])
def test_short_prompts_are_computed_here_if_so_wanted(num_tokens: int, here: bool) -> None:
    prompt = replace(asked(), prompt_token_ids=tuple(range(num_tokens)))
    assert choice(policy=LocalPrefill.BELOW_TOKENS).is_here(prompt) is here
    assert not choice().is_here(prompt)


def test_what_peers_compute_for_us_counts_until_the_first_token_or_the_end_of_each_stream() -> None:
    peers = choice()
    one, hedge, two = HandoffId("a", 1), HandoffId("a", 2), HandoffId("b", 1)
    for handoff, peer, num_tokens in ((one, "old", 10), (hedge, "new", 10), (two, "old", 5)):
        peers.opened(handoff, peer, num_tokens)
    assert peers.snapshot() == {"old": 15, "new": 10}
    peers.closed(hedge)
    peers.closed(hedge)
    assert peers.snapshot() == {"old": 15}
    for _ in range(2):
        peers.computed("a")
    peers.closed(one)
    assert peers.snapshot() == {"old": 5}
    peers.closed(two)
    assert peers.snapshot() == {}
    assert not peers._asked


def test_who_is_slow_is_asked_when_as_many_prompts_as_the_others_compute_in_its_time_wait_there() -> None:
    peers = choice()
    cast(Any, peers._peers).speeds.update({"old": Speed(950, 1_000), "new": Speed(10_000, 10_000)})
    assert peers.of(asked(peers=())) == ("new", "old")
    assert peers.of(asked(peers=("old", "new"))) == ("old", "new"), "its router knows best"
    for number in range(8):
        peers.opened(HandoffId("a", number), "new", 3)
    assert peers.of(asked(peers=())) == ("new", "old")
    peers.opened(HandoffId("a", 8), "new", 3)
    assert peers.of(asked(peers=())) == ("old", "new"), "it takes as long for one as the other one for ten"


def test_those_that_are_equally_fast_come_in_the_order_of_the_list_whatever_their_speed() -> None:
    prompt = replace(asked(peers=()), prompt_token_ids=tuple(range(15)))
    for number in range(900, 1000):
        peers = choice()
        cast(Any, peers._peers).speeds.update(dict.fromkeys(("old", "new"), Speed(number / 7, number / 7)))
        peers.opened(HandoffId("a", 1), "old", 14)
        assert peers.of(prompt) == ("old", "new"), "no more than this prompt waits there"


@pytest.mark.parametrize(("waiting", "wanted"), [(2, ("old", "new")), (3, ("new", "old"))])
def test_the_first_is_asked_at_which_no_more_than_this_prompt_waits(waiting: int, wanted: tuple[str, ...]) -> None:
    peers = choice()
    peers.opened(HandoffId("a", 1), "old", waiting)
    assert peers.of(asked(peers=())) == wanted
    assert peers.of(asked(peers=("old", "new"))) == ("old", "new"), "its router has counted already"
