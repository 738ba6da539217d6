"""What /debug/state shows of hand-offs: names and numbers that people and the fault harness read."""

from __future__ import annotations

from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Accepted, Agreed, ChunkReady, Done, Grant, HandoffId, Lending, Open, Want
from tests.unit.handoff.rig import BPT, CONFIG, FIRST, NEVER, H, decode_side, prefill_side, ready, request, stages


def test_a_hand_off_is_shown_at_d_with_its_stream_and_without() -> None:
    side = decode_side(NEVER)
    side.start(request(), 2, ("p",), 0.0)
    fresh = {
        "stage": "opening", "reserved": False, "peer": "p", "doubted_peer": "", "backends": ["fake"], "broken_backends": [],
        "serial": 1, "held_tokens": 2, "num_tokens": 10, "pieces_on_the_way": 0, "recoveries": [],
    }  # fmt: skip
    assert side.snapshot() == {"handoffs": {"r": fresh}, "late": 0}
    side.on_message(H, Agreed(backends=("fake", "spare")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", 2, 6), 0.0)
    side.on_message(H, ready("b", 6, 10), 0.0)
    for _ in range(2):
        side.on_failed(H, "a", "checksum", 0.0)
    side.on_message(H, ready("a2", 2, 6, "spare"), 0.0)
    shown = side.snapshot()["handoffs"]["r"]
    moved = {"stage": "transferring", "reserved": True, "backends": ["fake", "spare"], "broken_backends": ["fake"]}
    assert shown == {**fresh, **moved, "pieces_on_the_way": 1, "recoveries": ["refetch", "other_backend"]}
    side.on_failed(H, "a2", "checksum", 0.0)
    side.on_failed(H, "a2", "checksum", 0.0)
    side.on_message(H, ready("a3", 2, 6, "spare"), 0.0)
    side.on_failed(H, "a3", "checksum", 0.0)
    rungs = ["refetch", "other_backend", "refetch", "refetch", "reconnect"]
    gone = {"stage": "waiting", "reserved": True, "peer": "", "backends": [], "serial": 0, "recoveries": rungs}
    assert side.snapshot()["handoffs"]["r"] == {**fresh, **gone}


def test_a_hand_off_is_shown_at_p_in_every_stage() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=2, backend="fake"), 0.0)
    fresh = {
        "stage": "queued", "held_tokens": 2, "computed_tokens": 0, "cut_tokens": 2, "pieces": 0, "credit_bytes": 0,
        "spent_bytes": 0,
    }  # fmt: skip
    assert side.snapshot() == {"handoffs": {"r#1": fresh}, "published_bytes": 0, "late": 0}
    side.on_admitted(H, 0)
    side.on_message(H, Grant(credit_bytes=70), 0.0)
    side.on_computed("r#1", 7)
    side.on_admitted(HandoffId("gone", 7), 0)
    shown = {"stage": "computing", "computed_tokens": 7, "cut_tokens": 6, "pieces": 1, "credit_bytes": 70, "spent_bytes": 40}
    assert side.snapshot() == {"handoffs": {"r#1": {**fresh, **shown}}, "published_bytes": 40, "late": 1}
    side.on_first_token("r#1", FIRST)
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "computed"
    assert stages(side) == ["computed"]


def test_a_parked_prompt_is_shown_as_one_of_which_nothing_is_computed() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    side.on_admitted(H, 0)
    side.on_first_token("r#1", FIRST)
    assert side.snapshot()["handoffs"]["r#1"]["computed_tokens"] == 10
    side.on_parked("r#1")
    shown = side.snapshot()["handoffs"]["r#1"]
    assert (shown["stage"], shown["computed_tokens"], shown["cut_tokens"]) == ("parked", 0, 0)


def test_what_is_borrowed_and_what_is_lent_is_shown_by_request() -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", Lending(address="d0:1", backend="fake", dtype="float32"), (2, 11), 100.0)
    fresh = {"wanted": [2, 11], "arrived_tokens": 0, "reserved": False, "from": "d0:1"}
    assert side.snapshot() == {"r#1": fresh}
    side.on_reserved("r#1", 5.0)
    side.on_message(H, ready("a", 6, 10), 5.1)
    side.on_arrived(H, "a", 5.1)
    assert side.snapshot() == {"r#1": {**fresh, "arrived_tokens": 4, "reserved": True}}
    lender = Lender(CONFIG, bytes_per_token=BPT)
    lender.open(H, 11)
    assert lender.snapshot() == {}
    lender.on_message(H, Want(begin=2, end=11, reason="held"), 1.0)
    assert lender.snapshot() == {"r#1": {"wanted": [2, 11], "cut_tokens": 2, "pieces": 0}}
    lender.on_message(H, Grant(credit_bytes=80), 1.0)
    assert lender.snapshot() == {"r#1": {"wanted": [2, 11], "cut_tokens": 10, "pieces": 2}}


def test_counts_at_d_follow_the_stages() -> None:
    side = decode_side(NEVER)
    messages = [Accepted(cached_tokens=0), ready("a", 0, 4), Done(first=FIRST, num_chunks=3)]
    names = ["opening", "accepted", "transferring", "computed", "waiting"]
    side.start(request(), 0, ("p",), 0.0)
    for name, message in zip(names, [*messages, None], strict=False):
        assert stages(side) == [name]
        if message is not None:
            assert isinstance(message, Accepted | ChunkReady | Done)
            side.on_message(H, message, 0.0)
