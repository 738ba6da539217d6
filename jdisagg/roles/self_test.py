"""One request through the real loop of an engine, before READY: planned, dispatched, committed and delivered."""

from __future__ import annotations

import queue
from secrets import token_hex
from time import monotonic

from jdisagg.core.errors import ConfigError, NumericalError, SelfTestFailed
from jdisagg.core.requests import EngineRequest, FinishReason, Output, SamplingParams
from jdisagg.roles.engine_thread import EngineThread

TIMEOUT_S = 60.0
REQUEST_ID = "self-test"


def self_test(engine: EngineThread) -> None:
    """Run it and wait. Its prefix-cache salt is nobody else's: a decode worker computes none of its KV.

    Raises ConfigError for a checkpoint that holds NaN, as it does at the next start, else SelfTestFailed when the loop does not
    bring it to its end.
    """
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    request = EngineRequest(
        request_id=REQUEST_ID,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
        deadline_s=monotonic() + TIMEOUT_S,
        cache_salt=token_hex(16),
    )

    def sink(batch: list[Output]) -> None:
        for output in batch:
            outputs.put(output)

    engine.call(lambda: engine.loop.self_test(request, sink, monotonic()))
    while True:
        try:
            output = outputs.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise SelfTestFailed(f"the self-test did not finish within {TIMEOUT_S:.0f} s") from None
        if output.error is not None:
            kind = ConfigError if isinstance(output.error, NumericalError) else SelfTestFailed
            raise kind(f"the self-test failed: {output.error.message}") from output.error
        if output.finish in (FinishReason.LENGTH, FinishReason.STOP):
            return
