"""Computed prompts whose receiver has no pages: they are parked, and computed again with its first grant."""

from __future__ import annotations

import pytest

from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Grant, Parked, Started, StreamEnded
from tests.unit.handoff.rig import FIRST, LOTS, H, exports, is_awaited, none_of, only, opened, parkable, prefill_side, stages


def test_a_computed_prompt_whose_receiver_has_no_pages_stands_back_and_is_computed_again_with_the_first_grant() -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_computed("r#1", 10)
    assert parkable(side) == (), "its token is not told"
    side.on_first_token("r#1", FIRST)
    assert parkable(side) == ("r#1",)
    assert only(act.Reply, side.on_parked("r#1")).message == Parked()
    assert parkable(side) == ()
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "parked"
    assert not is_awaited(side)
    assert side.on_message(H, LOTS, 0.0) == [act.Unpark("r#1")], "nothing to cut: its KV is gone"
    assert is_awaited(side)
    assert side.on_message(H, LOTS, 0.0) == [], "asked for once"
    assert parkable(side) == (), "its receiver has pages now"
    assert side.on_started("r#1") == []
    assert exports(side.on_computed("r#1", 4)) == [(0, 4)]
    last = side.on_first_token("r#1", FIRST)
    assert exports(last) == [(4, 8), (8, 10)]
    assert none_of(act.Reply, last), "the token was told before"
    assert not is_awaited(side)


@pytest.mark.parametrize("nothing", [0, -5])
def test_a_grant_of_nothing_has_no_prompt_computed_again(nothing: int) -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_first_token("r#1", FIRST)
    side.on_parked("r#1")
    assert side.on_message(H, Grant(credit_bytes=nothing), 0.0) == []
    assert stages(side) == ["parked"]
    assert side.on_message(H, LOTS, 0.0) == [act.Unpark("r#1")]


def test_a_stream_that_ends_while_its_prompt_stands_back_is_released() -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_first_token("r#1", FIRST)
    side.on_parked("r#1")
    assert only(act.ReleaseRequest, side.on_message(H, StreamEnded(reason="closed"), 0.0)).engine_request_id == "r#1"
    assert side.is_idle


def test_who_is_awaited_has_pages_at_its_receiver_and_no_kv_here() -> None:
    side = prefill_side()
    opened(side, credit=False)
    assert only(act.Reply, side.on_started("r#1")).message == Started()
    assert not is_awaited(side), "its receiver has no pages"
    side.on_message(H, LOTS, 0.0)
    assert is_awaited(side)
    side.on_computed("r#1", 10)
    assert not is_awaited(side)
