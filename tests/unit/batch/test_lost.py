"""Requests that a fleet loses, and may have died of: they are asked apart from others, and end no batch."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from jdisagg.batch.journal import Journal
from jdisagg.batch.runner import Batch, run_batch
from jdisagg.batch.sender import MOST_LOST, Sender
from jdisagg.batch.tries import MOST_TIMES_TAKEN, QUARANTINE_S, NotNow, Tries
from jdisagg.core.errors import Unavailable
from tests.unit.batch.test_patience import (
    BEGAN_S,
    BUSY,
    DROPPED,
    FINE,
    LOST,
    PATIENCE_S,
    WRONG,
    Server,
    Step,
    ask,
    now_s,
    sleepless,
)

DONE = (200, {"object": "text_completion"})
FAILED = (502, {"error": {"message": "lost"}})
QUARANTINED = httpx.Response(502, json={"error": {"message": "lost"}}, headers={"x-should-retry": "false"})


@pytest.fixture(autouse=True)
def _short_pauses_by_the_loop_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.batch.tries.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("jdisagg.batch.tries.QUARANTINE_S", PATIENCE_S)
    monkeypatch.setattr("jdisagg.batch.awake.monotonic", now_s)


class Watched(Server):
    """Keeps when each request was under way: name, from, to."""

    def __init__(self, *, looked_s: float = 0.0, **scripts: list[Step]) -> None:
        """`looked_s`: how long it takes to say that it is there."""
        super().__init__(0.0, **scripts)
        self.looked_s = looked_s
        self.spans: list[tuple[str, float, float]] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        began_s = now_s()
        response = await super().__call__(request)
        if request.method == "POST":
            self.spans.append((json.loads(request.content)["name"], began_s - BEGAN_S, now_s() - BEGAN_S))
        else:
            await asyncio.sleep(self.looked_s)
        return response

    def of(self, name: str) -> list[tuple[str, float, float]]:
        return [span for span in self.spans if span[0] == name]

    def beside(self, span: tuple[str, float, float]) -> set[str]:
        _, begin_s, end_s = span
        return {name for name, from_s, to_s in self.spans if from_s < end_s and begin_s < to_s} - {span[0]}


class Proxied(Server):
    """A server behind a proxy, which says 502 while it is away."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().__call__(request)
        except httpx.TransportError:
            return LOST


@pytest.mark.parametrize("lost", [LOST, QUARANTINED])
def test_a_request_that_is_always_lost_fails_alone_though_nobody_else_is_asked(lost: httpx.Response) -> None:
    """As the last line of a batch: else that could never be finished."""
    assert ask(server := Server(0.0, a=[(0, lost)] * 20), "a") == [FAILED]
    assert PATIENCE_S <= server.ended_s < 2 * PATIENCE_S


def test_a_server_that_loses_everybody_s_requests_stops_the_batch_and_each_run_gets_further() -> None:
    names = [f"a{number}" for number in range(20)]
    outcomes = ask(server := Server(0.0, **{name: [(0.0, LOST)] * 200 for name in names}), *names)
    stopped = [str(outcome) for outcome in outcomes if isinstance(outcome, Unavailable)]
    assert "8 requests were lost, and none was served: HTTP 502: " in stopped[0]
    assert (outcomes.count(FAILED), len(stopped)) == (MOST_LOST - 1, 20 - MOST_LOST + 1)
    assert PATIENCE_S <= server.ended_s < 2 * PATIENCE_S


def test_a_server_that_loses_everybody_s_stops_the_batch_though_wrong_requests_are_refused_meanwhile() -> None:
    names = [f"a{number}" for number in range(20)]
    wrong: dict[str, list[Step]] = {f"b{number}": [*[(0, BUSY)] * number, (0, WRONG)] for number in range(5)}
    outcomes = ask(Server(0.0, **wrong, **{name: [(0.0, LOST)] * 200 for name in names}), *wrong, *names)
    lost = outcomes[len(wrong) :]
    assert [outcome for outcome in lost if not isinstance(outcome, Unavailable)] == [FAILED] * (MOST_LOST - 1)


def test_one_that_is_lost_for_the_first_time_has_its_own_patience_however_long_others_were_lost() -> None:
    server = Server(0.0, a=[(0, LOST)] * 200, b=[(0.29, BUSY), (0.29, BUSY), (0, LOST), (0, FINE)])
    assert ask(server, "a", "b") == [FAILED, DONE]
    assert server.asked_s["b"] > PATIENCE_S


def test_one_that_is_lost_while_another_is_computed_has_its_own_patience() -> None:
    assert ask(Server(0.0, a=[(0, LOST), (3.0, FINE)], b=[(1.0, LOST), (0, FINE)]), "a", "b") == [DONE, DONE]


def test_as_many_that_are_lost_while_others_are_served_stop_nothing() -> None:
    names = [f"a{number}" for number in range(2 * MOST_LOST)]
    served = {f"b{number}": [(0.1 * number, FINE)] for number in range(60)}
    outcomes = ask(Server(0.0, **served, **{name: [(0.0, LOST)] * 200 for name in names}), *served, *names)
    assert outcomes == [DONE] * len(served) + [FAILED] * len(names)


def test_requests_that_are_lost_fail_when_the_last_one_served_has_ended() -> None:
    assert ask(Server(0.0, a=[(0, LOST)] * 20, b=[(0.3, FINE)]), "a", "b") == [FAILED, DONE]


def test_who_was_quarantined_is_asked_once_more_and_nobody_beside_it() -> None:
    """`c` is under way still, and `d` comes in before that has ended."""
    server = Watched(a=[(0, QUARANTINED), (2.0, QUARANTINED), (0, FINE)], c=[(1.0, FINE)], d=[(0.7, BUSY), (0.1, FINE)])
    assert ask(server, "a", "c", "d") == [FAILED, DONE, DONE]
    _, again = server.of("a")
    assert not server.beside(again)
    assert server.asked_s["a"] >= 1.0
    assert PATIENCE_S < server.asked_s["d"] < 1.0, "nobody waits for one who waits"


def test_who_comes_while_one_that_was_quarantined_is_asked_waits_and_is_not_held_to_be_refused() -> None:
    server = Watched(a=[(0, QUARANTINED), (2.0, FINE)], d=[(0.25, BUSY), (0.25, BUSY), (0.02, BUSY), (0.1, FINE)])
    assert ask(server, "a", "d") == [DONE, DONE]
    assert not server.beside(server.of("a")[1])
    assert server.asked_s["d"] >= 2 * PATIENCE_S


@pytest.mark.parametrize(
    ("in_flight_s", "looked_s", "other_s"), [(2.0, 0.0, 2.0), (0.0, 0.0, PATIENCE_S), (0.0, 1.5, 1.5 + PATIENCE_S)]
)
def test_the_place_of_one_that_was_quarantined_is_another_one_s_until_all_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_flight_s: float, looked_s: float, other_s: float
) -> None:
    """Only behind the quarantine, where it was refused at once: as those would be that have the same prompt."""

    async def at_once(function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)  # a thread takes none of the loop's time, but ages by its clock
    names = [f"b{number}" for number in range(9)]
    server = Watched(
        looked_s=looked_s,
        a=[(in_flight_s, QUARANTINED), (1.0, FINE)],
        **{name: [(0.9 + 0.01 * i, FINE)] for i, name in enumerate(names)},
    )
    batch = Batch(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl", max_concurrency=2)
    batch.input.write_text("".join(json.dumps({"prompt": "p", "name": name}) + "\n" for name in ("a", *names)))

    async def body() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server), base_url="http://fake", timeout=60.0) as client:
            with Journal(batch.output, batch.header("fake")) as journal:
                await run_batch(batch, journal, Sender(client, patience_s=PATIENCE_S), lambda *_: None)

    with asyncio.Runner(loop_factory=sleepless) as runner:
        runner.run(body())
    assert server.spans[-1][0] == "a"
    assert not server.beside(server.spans[-1])
    assert max(sum(begin <= at < end for _, begin, end in server.spans) for _, at, _ in server.spans) == 2
    assert any(begin == pytest.approx(other_s, abs=0.01) for _, begin, _ in server.spans)
    assert server.spans[-1][2] < 7.0, "both places were taken all the time"


def test_a_server_that_refuses_stops_the_batch_however_many_are_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a router without workers, which waits for one each time."""
    monkeypatch.setattr("tests.unit.batch.test_patience.PATIENCE_S", 60.0)
    scripts: dict[str, list[Step]] = {f"a{i}": [(2, QUARANTINED), *[(5, BUSY)] * 90] for i in range(12)}
    outcomes = ask(server := Server(0.0, b=[(5, BUSY)] * 90, **scripts), *scripts, "b")
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 13
    assert 60.0 < server.ended_s < 150.0


def test_many_that_were_set_aside_and_are_lost_again_when_all_others_were_served_stop_nothing() -> None:
    names = [f"a{number}" for number in range(2 * MOST_LOST)]
    scripts: dict[str, list[Step]] = {name: [(0, QUARANTINED), (0.1, QUARANTINED)] for name in names}
    assert ask(Server(0.0, b=[(0, BUSY), (0, FINE)], **scripts), "b", *names) == [DONE] + [FAILED] * len(names)


def test_innocent_requests_that_were_quarantined_beside_another_are_served_one_by_one() -> None:
    names = [f"a{i}" for i in range(6)]
    scripts: dict[str, list[Step]] = {name: [(0, QUARANTINED), (1.0, FINE)] for name in names}
    server = Watched(**scripts | {"a3": [(0, QUARANTINED), (1.0, QUARANTINED)]})
    assert ask(server, *names) == [DONE, DONE, DONE, FAILED, DONE, DONE]
    assert all(not server.beside(server.of(name)[1]) for name in names)


def test_who_was_quarantined_and_is_then_refused_is_asked_again_until_it_is_lost() -> None:
    server = Server(0.0, a=[(0, QUARANTINED), (0, BUSY), (0, BUSY), (0, LOST), (0, FINE)])
    assert ask(server, "a") == [FAILED]
    assert len(server.scripts["a"]) == 1


@pytest.mark.parametrize("patience_s", [30.0, 3600.0, math.inf])
def test_whatever_the_patience_a_request_is_kept_for_as_long_as_a_quarantine_lasts(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jdisagg.batch.tries.QUARANTINE_S", QUARANTINE_S)
    tries, lost = Tries(), NotNow("HTTP 502", lost=True, quarantined=True, answer=FAILED)
    assert tries.rest_s(lost, patience_s) == QUARANTINE_S
    assert tries.rest_s(lost, patience_s) is None


def test_a_patience_shorter_than_a_quarantine_does_not_ask_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.batch.tries.QUARANTINE_S", 4 * PATIENCE_S)
    server = Server(0.0, a=[(0, QUARANTINED), (0, FINE)], b=[(0, LOST), (0, FINE)])
    assert ask(server, "a", "b") == [DONE, DONE]
    assert server.asked_s["a"] >= 4 * PATIENCE_S


def test_requests_that_were_lost_once_are_asked_one_by_one_and_others_beside_them() -> None:
    once: list[Step] = [(0, LOST), (1.0, FINE)]
    server = Watched(a=[*once], b=[*once], c=[*once], d=[(3.0, FINE)])
    assert ask(server, "a", "b", "c", "d") == [DONE] * 4
    assert [server.beside(server.of(name)[1]) for name in "abc"] == [{"d"}] * 3


def test_requests_that_a_restart_behind_a_proxy_lost_are_asked_again_at_once() -> None:
    names = [f"a{i}" for i in range(20)]
    server = Proxied(0.3, **{name: [(0.0, DROPPED), (1.0, FINE)] for name in names})
    assert ask(server, *names) == [DONE] * 20
    assert server.ended_s < 1.6


def test_a_request_that_no_server_behind_a_proxy_survives_fails_alone() -> None:
    server = Proxied(0.3, a=[(0, DROPPED)] * 20)
    assert ask(server, "a") == [FAILED]
    assert len(server.scripts["a"]) == 20 - MOST_TIMES_TAKEN


def test_a_server_that_is_away_behind_a_proxy_stops_the_batch() -> None:
    outcomes = ask(server := Proxied(60.0, a=[(0, DROPPED)], b=[(0, LOST)] * 20), "a", "b")
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 2
    assert PATIENCE_S <= server.ended_s < 2 * PATIENCE_S


def test_a_server_that_refuses_behind_losses_has_the_whole_patience() -> None:
    server = Server(0.0, a=[*[(0, LOST)] * 4, *[(0, BUSY)] * 5, (0, FINE)])
    assert ask(server, "a") == [DONE]
    assert server.ended_s > PATIENCE_S
