"""Values the hand-off tests share: small requests, pieces of ten bytes a token, both sides."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest, Output, SamplingParams
from jdisagg.handoff.actions import Export
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Agreed, ChunkReady, Grant, HandoffId, Lending, Open, StreamEnded
from jdisagg.handoff.prefill_side import PrefillSide

BPT = 10
CONFIG = TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=1000)
NEVER = TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=1000, local_prefill=LocalPrefill.NEVER)
H, H2 = HandoffId("r", 1), HandoffId("r", 2)
DEAD = StreamEnded(reason="dead")
LEFT = Agreed(backends=("fake",))  # Open has
LENDING = Lending(address="d0:1", backend="fake", dtype="float32")
LOTS = Grant(credit_bytes=10_000)
FIRST = Output(request_id="r#1", token_ids=(42,))
A = TypeVar("A")


def request(num_tokens: int = 10, max_tokens: int = 5, deadline_s: float = 100.0, request_id: str = "r") -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(1, num_tokens + 1)),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_s=deadline_s,
    )


def decode_side(config: TransferConfig = CONFIG) -> DecodeSide:
    """Credit for four pieces at a time."""
    config = replace(config, transfer_buffer_bytes=4 * config.transfer_chunk_tokens * BPT)
    return DecodeSide(config, chunk_bytes_per_token=BPT, backend="fake")


def prefill_side(config: TransferConfig = CONFIG) -> PrefillSide:
    keys = itertools.count()
    return PrefillSide(config, bytes_per_token=BPT, new_key=lambda: f"k{next(keys)}")


def opened(side: PrefillSide, handoff: HandoffId = H, num_tokens: int = 10, held: int = 0, *, credit: bool = True) -> None:
    """A prompt is admitted; with `credit` D takes all of it."""
    side.open(handoff, Open(request=request(num_tokens), held_tokens=held, backend="fake"), 0.0)
    side.on_admitted(handoff, 0)
    if credit:
        side.on_message(handoff, LOTS, 0.0)


def ready(key: str, begin: int, end: int, backend: str = "fake") -> ChunkReady:
    size = end - begin
    return ChunkReady(
        key=key,
        begin=begin,
        end=end,
        shape=(1, size, 1, 5),
        dtype="bfloat16",
        num_bytes=size * BPT,
        checksum=0,
        backend=backend,
    )


def transferring(side: DecodeSide, peers: tuple[str, ...] = ("p",)) -> ChunkReady:
    """One piece, [0, 4), is being fetched."""
    side.start(request(), 0, peers, 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    piece = ready("a", 0, 4)
    side.on_message(H, piece, 0.0)
    return piece


def exports(actions: Sequence[object]) -> list[tuple[int, int]]:
    """Token ranges that are to be published."""
    return [(a.begin, a.end) for a in actions if isinstance(a, Export)]


def only(kind: type[A], actions: Sequence[object]) -> A:
    """The one action of a kind."""
    (found,) = (action for action in actions if isinstance(action, kind))
    return found


def parkable(side: PrefillSide) -> tuple[str, ...]:
    """Engine requests that may be parked, as far as they are concerned."""
    return tuple(record.engine_request_id for record in side._live.begun() if record.is_parkable)


def is_awaited(side: PrefillSide) -> bool:
    """Whether some D has pages for a prompt that is not computed."""
    return any(record.is_awaited for record in side._live.begun())


def none_of(kind: type, actions: Sequence[object]) -> bool:
    return not any(isinstance(action, kind) for action in actions)


def stages(side: DecodeSide | PrefillSide) -> list[str]:
    """Of its live hand-offs."""
    return [shown["stage"] for shown in side.snapshot()["handoffs"].values()]
