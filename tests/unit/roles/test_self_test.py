"""What a start makes of the self-test of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from jdisagg.core.errors import ConfigError, DeadlineExceeded, NumericalError, RequestError
from jdisagg.core.requests import EngineRequest, FinishReason, Output
from jdisagg.roles import self_test
from jdisagg.roles.engine_thread import EngineThread


class Engine:
    """Its thread and its loop: it answers any request with `outputs`."""

    def __init__(self, *outputs: Output) -> None:
        self.loop = self
        self._outputs = list(outputs)
        self.asked: list[str] = []

    def call(self, function: Callable[[], object]) -> None:
        function()

    def self_test(self, request: EngineRequest, sink: Callable[[list[Output]], None], now_s: float) -> None:
        assert request.deadline_s > now_s
        self.asked.append(request.request_id)
        sink(self._outputs)


def failed(error: RequestError) -> Output:
    return Output(request_id="self-test", finish=FinishReason.ERROR, error=error)


@pytest.mark.parametrize(
    ("outputs", "status", "text"),
    [
        ((failed(NumericalError("NaN in layer 3")),), 2, "the self-test failed: NaN in layer 3"),
        ((failed(DeadlineExceeded("too late")),), 1, "the self-test failed: too late"),
        ((Output(request_id="self-test", token_ids=(5,)),), 1, "the self-test did not finish within"),
    ],
)
def test_a_self_test_that_fails_ends_a_start_in_one_line_and_for_good_where_the_next_would_too(
    outputs: tuple[Output, ...], status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=text) as refused:
        self_test.self_test(cast(EngineThread, cast(Any, Engine(*outputs))))
    assert refused.value.exit_status == status


def test_a_self_test_that_passes_says_nothing_and_asks_once() -> None:
    engine = Engine(Output(request_id="self-test", token_ids=(5,), finish=FinishReason.LENGTH))
    self_test.self_test(cast(EngineThread, cast(Any, engine)))
    assert engine.asked == ["self-test"]
