"""One request handed off without trouble, message by message."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Ack, Done, Grant, Open
from tests.unit.handoff.rig import FIRST, H, decode_side, prefill_side, ready, request


@pytest.mark.covers("D02", "P06")
def test_decode_side_opens_before_memory_and_completes_after_the_last_piece() -> None:
    side = decode_side()
    assert side.start(request(), 2, ("p",), 0.0) == [
        act.OpenStream(H, "p", Open(request=request(), held_tokens=2, backend="fake", max_piece_tokens=4))
    ]
    assert side.on_message(H, Accepted(cached_tokens=3), 0.0) == []
    assert side.on_reserved("r", 0.0) == [act.Send(H, Grant(credit_bytes=160))]
    piece = ready("a", 2, 6)
    assert side.on_message(H, piece, 1.0) == [act.Fetch(H, "p", piece, 6.0)]
    first = side.on_message(H, Done(first=FIRST, num_chunks=2), 1.0)
    assert first == [act.FirstToken("r", Output(request_id="r", token_ids=(42,)))]
    side.on_message(H, ready("b", 6, 10), 1.0)
    assert side.on_arrived(H, "a", 1.0) == [
        act.Import("r", H, "a"),
        act.Send(H, Ack(key="a")),
        act.Send(H, Grant(credit_bytes=200)),
    ]
    last = side.on_arrived(H, "b", 1.0)
    assert last[:2] == [act.Import("r", H, "b"), act.Send(H, Ack(key="b"))]
    complete = next(action for action in last if isinstance(action, act.KVComplete))
    assert (complete.provenance.transferred_tokens, complete.provenance.transferred_bytes) == (8, 80)
    assert (complete.provenance.prefill_worker, complete.provenance.prefilled_tokens) == ("p", 7)
    assert complete.brought_by == "p"
    assert last[-1] == act.CloseStream(H)
    assert side.is_idle


@pytest.mark.covers("P06", "V22", "V23")
def test_prefill_side_sends_while_computing_and_releases_after_the_last_ack() -> None:
    side = prefill_side()
    (admit,) = side.open(H, Open(request=request(), held_tokens=2, backend="fake"), 0.0)
    assert isinstance(admit, act.Admit)
    assert admit.request.request_id == "r#1"
    assert side.owns("r#1")
    assert side.on_admitted(H, 0) == [act.Reply(H, Accepted(cached_tokens=0))]
    assert side.on_computed("r#1", 7) == [], "nothing leaves before credit"
    assert side.on_message(H, Grant(credit_bytes=160), 0.0) == [act.Export(H, "r#1", 2, 6, "k0")]
    assert side.on_published(H, ready("k0", 2, 6), 0.0) == [act.Reply(H, ready("k0", 2, 6))]
    assert side.on_computed("r#1", 10) == [act.Export(H, "r#1", 6, 10, "k1")]
    assert side.on_first_token("r#1", FIRST) == [
        act.Reply(H, Done(first=Output(request_id="r", token_ids=(42,)), num_chunks=2))
    ]
    assert side.on_message(H, Ack(key="k0"), 0.0) == [act.Discard("k0")]
    side.on_published(H, ready("k1", 6, 10), 0.0)
    assert side.on_message(H, Ack(key="k1"), 0.0) == [act.Discard("k1"), act.ReleaseRequest("r#1"), act.CloseReply(H)]
    assert side.is_idle
    assert not side.owns("r#1")


@pytest.mark.covers("D20")
def test_a_request_with_one_token_to_go_transfers_nothing() -> None:
    decode, prefill = decode_side(), prefill_side()
    decode.start(request(max_tokens=1), 0, ("p",), 0.0)
    decode.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert decode.on_reserved("r", 0.0) == []
    prefill.open(H, Open(request=request(max_tokens=1), held_tokens=0, backend="fake"), 0.0)
    prefill.on_admitted(H, 0)
    assert prefill.on_computed("r#1", 10) == []
    done, *rest = prefill.on_first_token("r#1", Output(request_id="r#1", token_ids=(7,), finish=FinishReason.LENGTH))
    assert rest == [act.ReleaseRequest("r#1"), act.CloseReply(H)]
    assert isinstance(done, act.Reply)
    actions = decode.on_message(H, done.message, 0.0)  # pyright: ignore[reportArgumentType]
    assert actions[0] == act.FirstToken("r", Output(request_id="r", token_ids=(7,), finish=FinishReason.LENGTH))
    assert actions[-1] == act.CloseStream(H)
    assert decode.is_idle
    assert prefill.is_idle


@pytest.mark.covers("X23")
def test_a_prompt_held_whole_sends_nothing_and_waits_for_pages() -> None:
    decode, prefill = decode_side(), prefill_side()
    decode.start(request(), 10, ("p",), 0.0)
    decode.on_message(H, Accepted(cached_tokens=0), 0.0)
    prefill.open(H, Open(request=request(), held_tokens=10, backend="fake"), 0.0)
    prefill.on_admitted(H, 10)
    prefill.on_message(H, Grant(credit_bytes=1000), 0.0)
    assert prefill.on_computed("r#1", 10) == []
    done = prefill.on_first_token("r#1", FIRST)
    assert done == [
        act.Reply(H, Done(first=Output(request_id="r", token_ids=(42,)), num_chunks=0)),
        act.ReleaseRequest("r#1"),
        act.CloseReply(H),
    ]
    assert [type(a) for a in decode.on_message(H, Done(first=FIRST, num_chunks=0), 0.0)] == [act.FirstToken]
    actions = decode.on_reserved("r", 0.0)
    assert isinstance(actions[0], act.KVComplete)
    assert decode.is_idle
