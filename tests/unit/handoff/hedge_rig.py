"""One request whose prefill worker falls quiet in the middle of its transfer, and what D does about it."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, HandoffId, PrefillToDecode, Quiet, Started, StreamEnded
from tests.unit.handoff.rig import CONFIG, H, decode_side, only, ready, request

H3 = HandoffId("r", 3)
QUIET = Quiet(0.6)
SILENCE = StreamEnded(reason="heartbeat")


def say(side: DecodeSide, handoff: HandoffId, *messages: PrefillToDecode, now_s: float = 1.0) -> list[act.DecodeAction]:
    """What follows from the last of them."""
    actions: list[act.DecodeAction] = []
    for message in messages:
        actions = side.on_message(handoff, message, now_s)
    return actions


def transferring(*peers: str, config: TransferConfig = CONFIG) -> DecodeSide:
    """[0, 4) is in place, [4, 8) is being fetched, [8, 10) is not announced."""
    side = decode_side(config)
    side.start(request(), 0, peers or ("p", "q"), 0.0)
    say(side, H, Accepted(cached_tokens=0), Started())
    side.on_reserved("r", 0.0)
    say(side, H, ready("a", 0, 4), ready("b", 4, 8))
    side.on_arrived(H, "a", 0.0)
    return side


def hedged(*peers: str, config: TransferConfig = CONFIG) -> DecodeSide:
    side = transferring(*peers, config=config)
    say(side, H, QUIET)
    return side


def closed(actions: Sequence[act.DecodeAction]) -> list[HandoffId]:
    """Streams that end, whose fetches end with them."""
    handoffs = [action.handoff for action in actions if isinstance(action, act.CloseStream)]
    assert [action.handoff for action in actions if isinstance(action, act.CancelFetch)] == handoffs
    return handoffs


def outcome(actions: Sequence[act.DecodeAction]) -> tuple[str, str, str]:
    ended = only(act.Hedged, actions)
    assert ended.request_id == "r"
    return ended.outcome, ended.peer, ended.other
