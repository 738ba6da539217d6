"""Prompts that are computed at P while their KV is on its way, and what D makes of it when it does not come."""

from __future__ import annotations

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.line import LATE_S
from jdisagg.handoff.messages import Accepted, Agreed, Done, HandoffId, Started
from tests.unit.handoff.rig import CONFIG, FIRST, H, decode_side, only, ready, request

LATE = LATE_S + 0.001  # pieces here are small


def computed(*peers: str, config: TransferConfig = CONFIG, backends: tuple[str, ...] = ("fake",)) -> DecodeSide:
    """At 2 s the first token is there; [0, 4), [4, 8) and [8, 10) have been on their way since 1 s."""
    side = decode_side(config)
    compute(side, H, peers or ("p", "q"), backends)
    return side


def compute(side: DecodeSide, handoff: HandoffId, peers: tuple[str, ...], backends: tuple[str, ...] = ("fake",)) -> None:
    side.start(request(request_id=handoff.request_id), 0, peers, 0.0)
    for message in (Agreed(backends=backends), Accepted(cached_tokens=0), Started()):
        side.on_message(handoff, message, 0.0)
    side.on_reserved(handoff.request_id, 0.0)
    for key, begin, end in (("a", 0, 4), ("b", 4, 8), ("c", 8, 10)):
        side.on_message(handoff, ready(key, begin, end, backend=backends[0]), 1.0)
    side.on_message(handoff, Done(first=FIRST, num_chunks=3), 2.0)


def rung(actions: list[act.DecodeAction]) -> tuple[str, str, bool]:
    """The one taken, for which peer, and whether that is said to bring no KV."""
    taken = only(act.Recovered, actions)
    return taken.rung, taken.peer, act.NoKV(taken.peer, taken.cause) in actions
