"""What a hand-off costs its engine thread does not grow with the prompt: no piece and no tick goes through its tokens."""

from __future__ import annotations

from collections import deque

from jdisagg.core.requests import EngineRequest, Output, SamplingParams
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, HandoffId, Started
from jdisagg.handoff.prefill_side import PrefillSide
from tests.unit.handoff.rig import NEVER, H, decode_side, is_awaited, prefill_side, ready

NUM_PIECES = 6


class Counted(EngineRequest):
    """Counts how often somebody makes one tuple of all tokens, which is a copy for a request that goes on behind some."""

    num_copies = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        Counted.num_copies += 1
        return self.prompt_token_ids + self.generated_token_ids


def both_sides() -> tuple[DecodeSide, PrefillSide, deque[act.DecodeAction], deque[act.PrefillAction]]:
    """A resumed request of `NUM_PIECES` pieces, accepted and computed, with pages at D."""
    asked = Counted(
        request_id="r",
        prompt_token_ids=tuple(range(4 * NUM_PIECES - 3)),
        generated_token_ids=(7, 8, 9),
        sampling=SamplingParams(max_tokens=9),
        deadline_s=100.0,
    )
    decode, prefill = decode_side(NEVER), prefill_side(NEVER)
    to_prefill = deque(decode.start(asked, 0, ("p",), 0.0))
    opened = to_prefill.popleft()
    assert isinstance(opened, act.OpenStream)
    to_decode = deque(prefill.open(H, opened.message, 0.0))
    to_decode.extend(prefill.on_admitted(H, 0))
    for message in (Accepted(cached_tokens=0), Started()):
        decode.on_message(H, message, 0.0)
    to_prefill.extend(decode.on_reserved("r", 0.0))
    return decode, prefill, to_prefill, to_decode


def test_no_piece_of_a_resumed_request_costs_a_copy_of_its_tokens() -> None:
    decode, prefill, to_prefill, to_decode = both_sides()
    Counted.num_copies = 0
    to_decode.extend(prefill.on_computed("r#1", 4 * NUM_PIECES))
    to_decode.extend(prefill.on_first_token("r#1", Output(request_id="r#1", token_ids=(42,))))
    done: list[str] = []
    while to_prefill or to_decode:
        assert not is_awaited(prefill)
        for action in decode.tick(1.0) + list(prefill.tick(1.0)):
            raise AssertionError(action)
        match to_prefill.popleft() if to_prefill else to_decode.popleft():
            case act.Send(message=message):
                to_decode.extend(prefill.on_message(H, message, 1.0))
            case act.Reply(message=message) if not isinstance(message, Accepted):
                to_prefill.extend(decode.on_message(H, message, 1.0))
            case act.Export(key=key, begin=begin, end=end):
                to_decode.extend(prefill.on_published(H, ready(key, begin, end), 1.0))
            case act.Fetch(ready=announced):
                to_prefill.extend(decode.on_arrived(HandoffId("r", 1), announced.key, 1.0))
            case act.KVComplete(request_id=request_id):
                done.append(request_id)
    assert done == ["r"]
    assert Counted.num_copies == 0
