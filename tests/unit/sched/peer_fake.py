"""What a decode worker's scheduler sees of a prefill worker: a first token, and KV in the pages it reserved."""

from __future__ import annotations

from jdisagg.core.requests import FinishReason, Output
from jdisagg.sched.table import Reserved
from tests.unit.sched.engine_fake import FakeEngine, next_token

PROMPT = tuple(range(1, 11))  # 10 tokens: two full pages and a half


def first_of(prompt: tuple[int, ...], request_id: str, finish: FinishReason | None = None) -> Output:
    """What the peer answers."""
    return Output(request_id=request_id, token_ids=(next_token(prompt),), finish=finish)


def arrive(engine: FakeEngine, reserved: Reserved, tokens: tuple[int, ...], *, first: bool = True) -> None:
    """The peer's first token and all KV of one reserved sequence."""
    if first:
        output = engine.scheduler.remote_first_token(reserved.request_id, first_of(tokens, reserved.request_id))
        engine.collect([output])
    engine.device.import_tokens(reserved.page_table, tokens, reserved.held_tokens, reserved.num_tokens)
    engine.scheduler.kv_arrived(reserved.request_id)


def status_of(engine: FakeEngine, request_id: str) -> str:
    """Where a request is."""
    return next((s["status"] for s in engine.scheduler.snapshot()["sequences"] if s["request_id"] == request_id), "gone")
