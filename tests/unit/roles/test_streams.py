"""Outputs on their way to who asked for them."""

from __future__ import annotations

from typing import Any, cast

from jdisagg.core.requests import FinishReason, Output
from jdisagg.roles.streams import Streams
from tests.unit.sched.engine_fake import request


class Timeline:
    """Notes what was delivered."""

    def __init__(self) -> None:
        self.delivered_s: list[float] = []

    def delivered(self, output: Output, now_s: float) -> None:
        self.delivered_s.append(now_s)


def output(request_id: str, token: int, finish: FinishReason | None = None) -> Output:
    return Output(request_id=request_id, token_ids=(token,), finish=finish)


def test_one_tick_is_one_call_for_each_sink_whoever_has_gone_meanwhile() -> None:
    streams, timelines, got = Streams(), {name: Timeline() for name in "abc"}, dict[str, list[list[Output]]](one=[], two=[])
    one, two = got["one"].append, got["two"].append
    for name, sink in (("a", one), ("b", two), ("c", one)):
        streams.open(request(name, (1, 2), 9), sink, cast(Any, timelines[name]))
    outputs = [output("gone", 1), output("a", 2), output("b", 3, FinishReason.STOP), output("gone", 4), output("c", 5)]
    streams.deliver(outputs, now_s=7.0)
    assert got == {"one": [[outputs[1], outputs[4]]], "two": [[outputs[2]]]}
    assert [timeline.delivered_s for timeline in timelines.values()] == [[7.0]] * 3
    assert [name for name, _ in streams.items()] == ["a", "c"], "who has finished is forgotten"
    assert len(streams) == 2


def test_a_stream_is_closed_once_and_may_be_closed_again() -> None:
    streams = Streams()
    asked = request("a", (1, 2), 9)
    streams.open(asked, print, cast(Any, Timeline()), "router 1")
    stream = streams.get("a")
    assert stream is not None
    assert (stream.request, stream.sink, stream.front_end) == (asked, print, "router 1")
    for _ in range(2):
        streams.close("a")
        assert streams.get("a") is streams.record("a") is None
