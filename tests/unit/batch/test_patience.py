"""How long a batch waits for its server: only while the server is away, whatever one request goes through."""

from __future__ import annotations

import asyncio
import json
import random
import selectors

import httpx
import pytest

from jdisagg.batch.lines import Call
from jdisagg.batch.sender import Sender
from jdisagg.batch.tries import MOST_TIMES_TAKEN, BadAnswer
from jdisagg.core.errors import ConfigError, Unavailable

PATIENCE_S = 0.6
BEGAN_S = 1000.0  # by a clock that nobody has just started
FINE = httpx.Response(200, json={"object": "text_completion"})
BUSY = httpx.Response(503, json={"error": {"message": "busy"}})
LATE = httpx.Response(504, json={"error": {"message": "late"}})
LOST = httpx.Response(502, json={"error": {"message": "lost"}})
WRONG = httpx.Response(400, json={"error": {"message": "too long"}})  # as a router without workers says, too
DROPPED = httpx.RemoteProtocolError("Server disconnected without sending a response.")
NO_HTTP = httpx.RemoteProtocolError("illegal request line")
Step = tuple[float, httpx.Response | Exception]  # seconds it takes, and what comes of it


class Sleepless(selectors.DefaultSelector):
    """For a loop whose clock goes on by what it would have waited, and a trifle: nobody wakes up too early."""

    now_s = BEGAN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout + 1e-6 if timeout else 0.0
        return super().select(timeout and 0.0)


def sleepless() -> asyncio.AbstractEventLoop:
    selector = Sleepless()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s
    return loop


def now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def _short_pauses_by_the_loop_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.batch.tries.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("jdisagg.batch.awake.monotonic", now_s)


class Server:
    """Answers requests by a script, each of its own; `away_s` after a request was dropped nobody is there."""

    def __init__(self, away_s: float, **scripts: list[Step]) -> None:
        self.away_s = away_s
        self.back_s = self.ended_s = 0.0
        self.scripts = scripts
        self.asked_s: dict[str, float] = {}  # last

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if now_s() < self.back_s:
            raise httpx.ConnectError("refused")
        if request.method == "GET":
            return httpx.Response(200 if request.url.path == "/v1/models" else 404, json={"data": [{"id": "fake"}]})
        name = json.loads(request.content)["name"]
        self.asked_s[name] = now_s() - BEGAN_S
        seconds, outcome = self.scripts[name].pop(0)
        await asyncio.sleep(seconds)
        if isinstance(outcome, Exception):
            self.back_s = now_s() + self.away_s
            raise outcome
        return outcome


def ask(server: Server, *names: str) -> list[object]:
    """What comes of a request of each name, sent at once."""

    async def body() -> list[object]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server), base_url="http://fake", timeout=3600.0) as client:
            sender = Sender(client, patience_s=PATIENCE_S)
            calls = [Call(number=1, custom_id=name, url="/v1/completions", body={"name": name}) for name in names]
            outcomes = await asyncio.gather(*(sender.send(call, "batch_b_1") for call in calls), return_exceptions=True)
            server.ended_s = now_s() - BEGAN_S
            return list(outcomes)

    with asyncio.Runner(loop_factory=sleepless) as runner:
        return runner.run(body())


def test_an_outage_behind_a_refusal_and_a_long_answer_has_the_whole_patience() -> None:
    server = Server(0.4, a=[(0, BUSY), (1.0, DROPPED), (0, FINE)])
    assert ask(server, "a") == [(200, {"object": "text_completion"})]


def test_waiting_for_another_line_s_turn_is_not_the_server_s_absence() -> None:
    """Both are dropped twice; then `a` is refused around the second that `b` takes alone."""
    twice = [(0.0, DROPPED)] * 2
    server = Server(0.0, a=[*twice, (0, BUSY), (0, BUSY), (0, FINE)], b=[*twice, (1.0, FINE)])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2


def test_waiting_for_one_that_is_computed_for_long_and_not_served_is_not_the_server_s_absence_either() -> None:
    """Both are dropped twice; `b` takes a minute then, and its worker goes down with it."""
    twice = [(0.0, DROPPED)] * 2
    server = Server(0.0, a=[*twice, (0, BUSY), (0, BUSY), (0, FINE)], b=[*twice, (60.0, BUSY), (0, FINE)])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2


def test_who_was_refused_before_others_were_even_sent_fails_alone_though_it_waited_for_its_turn_since() -> None:
    twice = [(0.0, DROPPED)] * 2
    server = Server(0.0, a=[*twice, *[(0, BUSY)] * 60], b=[*twice, (60.0, WRONG)], c=[(0.5, BUSY), (0, FINE)])
    assert ask(server, "a", "b", "c")[0] == (503, {"error": {"message": "busy"}})
    assert server.ended_s > 60.0


@pytest.mark.parametrize(("restarts", "least_s", "most_s"), [(1, 1.0, 1.5), (2, 20.0, 20.5)])
def test_a_server_that_restarts_once_is_asked_everything_again_at_once_and_one_by_one_behind_a_second_time(
    restarts: int, least_s: float, most_s: float
) -> None:
    names = [f"a{i}" for i in range(20)]
    server = Server(0.0, **{name: [*[(0.0, DROPPED)] * restarts, (1.0, FINE)] for name in names})
    assert ask(server, *names) == [(200, {"object": "text_completion"})] * 20
    assert least_s <= server.ended_s < most_s


@pytest.mark.parametrize(
    ("says", "least_s", "most_s"),
    [("0.3", 0.0, 0.1), ("Mon, 23 Nov 2026 18:00:00 GMT", 0.0, 0.1), ("0", 0.0, 0.1), ("2", 2.0, 2.1), ("9" * 400, 10.0, 10.1)],
)
def test_a_server_that_says_when_to_come_back_is_not_asked_before(
    says: str, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.batch.test_patience.PATIENCE_S", 10.0)
    busy = httpx.Response(429, json={"error": {"message": "full"}}, headers={"retry-after": says})
    assert ask(server := Server(0.0, a=[(0, busy), (0, FINE)]), "a") == [(200, {"object": "text_completion"})]
    assert least_s <= server.ended_s < most_s


def test_a_server_that_refuses_for_longer_than_the_patience_stops_the_batch() -> None:
    (error,) = ask(server := Server(0.0, a=[(0, BUSY)] * 20), "a")
    assert isinstance(error, Unavailable)
    assert PATIENCE_S <= server.ended_s < 2 * PATIENCE_S


def test_a_server_that_speaks_something_else_than_http_is_not_waited_for() -> None:
    (error,) = ask(server := Server(0.0, a=[(0, httpx.ConnectError("refused")), (0, NO_HTTP)]), "a")
    assert isinstance(error, ConfigError)
    assert server.ended_s < PATIENCE_S / 2


def test_bytes_that_are_no_http_of_a_server_that_spoke_it_are_a_failure_like_others() -> None:
    assert ask(Server(0.0, a=[(0, BUSY), (0, NO_HTTP), (0, FINE)]), "a") == [(200, {"object": "text_completion"})]


class Stopping(Server):
    """This process is stopped for `still_s`, a hundredth of a second after the first request, and goes on."""

    still_s = 60.0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.asked_s:
            asyncio.get_running_loop().call_later(0.01, self.stop)
        return await super().__call__(request)

    def stop(self) -> None:
        asyncio.get_running_loop()._selector.now_s += self.still_s  # type: ignore[attr-defined]


@pytest.mark.parametrize("outcome", [BUSY, DROPPED])
def test_time_in_which_this_process_stood_still_is_not_the_server_s_absence(outcome: httpx.Response | Exception) -> None:
    scripts = {name: [(0.0, outcome), (0.0, BUSY), (0.0, FINE)] for name in ("a", "b")}
    assert ask(Stopping(60.2, **scripts), "a", "b") == [(200, {"object": "text_completion"})] * 2


@pytest.mark.parametrize("outcome", [httpx.ReadTimeout("nothing came"), LATE])
def test_what_came_too_late_as_this_process_stood_still_is_asked_for_again(outcome: httpx.Response | Exception) -> None:
    assert ask(Stopping(0.0, a=[(30.0, outcome), (0.0, FINE)]), "a") == [(200, {"object": "text_completion"})]


def test_what_came_too_late_is_the_server_s_fault_where_this_process_stood_still_for_a_moment() -> None:
    silent = httpx.ReadTimeout("nothing came")
    server = Stopping(0.0, a=[(30.0, silent), (0.0, FINE)], b=[(30.0, LATE), (0.0, FINE)])
    server.still_s = 2.5
    failed, late = ask(server, "a", "b")
    assert isinstance(failed, BadAnswer)
    assert late == (504, {"error": {"message": "late"}})


@pytest.mark.parametrize("outcome", [httpx.ReadTimeout("nothing came"), LATE])
def test_a_request_that_had_not_all_of_its_time_is_asked_again_however_short_the_standstill(
    outcome: httpx.Response | Exception,
) -> None:
    server = Stopping(0.0, a=[(3600.5, outcome), (0.0, FINE)])
    server.still_s = 20.0
    assert ask(server, "a") == [(200, {"object": "text_completion"})]


def test_a_connection_that_was_cut_while_this_process_stood_still_is_held_against_nobody() -> None:
    server = Stopping(0.0, a=[(0.1, DROPPED), *[(0.0, DROPPED)] * (MOST_TIMES_TAKEN - 1), (0.0, FINE)])
    assert ask(server, "a") == [(200, {"object": "text_completion"})]


@pytest.mark.parametrize("seed", range(8))
def test_what_this_process_loses_between_two_looks_at_the_clock_is_no_standstill(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is dropped within a millisecond, each time it is asked, and a busy machine takes some tenths of that."""
    draw = random.Random(seed)

    def late_s() -> float:
        asyncio.get_running_loop()._selector.now_s += draw.choice([0.0, 0.0004])  # type: ignore[attr-defined]
        return now_s()

    monkeypatch.setattr("jdisagg.batch.awake.monotonic", late_s)
    server = Server(0.0, a=[(0.0005, DROPPED)] * MOST_TIMES_TAKEN + [(0.0, FINE)])
    (error,) = ask(server, "a")
    assert isinstance(error, BadAnswer)


def test_a_line_that_is_late_twice_stops_no_batch() -> None:
    """Each try of it takes longer than the patience, and this process stands still in each."""
    server = Stopping(0.0, a=[(30.0, LATE), (30.0, BUSY), (0.0, FINE)])
    assert ask(server, "a") == [(200, {"object": "text_completion"})]


def test_a_line_that_is_late_whenever_it_is_asked_fails_in_the_end() -> None:
    class Starved(Stopping):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            asyncio.get_running_loop().call_later(0.01, self.stop)
            return await Server.__call__(self, request)

    server = Starved(0.0, a=[(30.0, LATE)] * 20)
    assert ask(server, "a") == [(504, {"error": {"message": "late"}})]
    assert 5 * 60.0 < server.ended_s < 7 * 100.0


def test_nothing_goes_on_once_everything_is_answered() -> None:
    async def body() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(Server(0.0)), base_url="http://fake") as client:
            await Sender(client, patience_s=PATIENCE_S).get("/v1/models")
            await asyncio.sleep(0.0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=sleepless) as runner:
        runner.run(body())


def test_one_task_looks_whether_this_process_stands_still_however_many_ask() -> None:
    class Counting(Server):
        most = 0

        async def __call__(self, request: httpx.Request) -> httpx.Response:
            looking = sum("look" in str(task.get_coro()) for task in asyncio.all_tasks())
            self.most = max(self.most, looking)
            return await super().__call__(request)

    names = [f"a{i}" for i in range(9)]
    ask(server := Counting(0.0, **{name: [(0.1, BUSY), (0.1, FINE)] for name in names}), *names)
    assert server.most == 1


def test_after_a_standstill_of_this_process_a_server_that_refuses_has_what_is_left_of_the_patience() -> None:
    errors = ask(server := Stopping(0.0, a=[(0, BUSY)] * 20, b=[(0, BUSY)] * 20), "a", "b")
    assert [type(error) for error in errors] == [Unavailable] * 2
    assert 60.0 + PATIENCE_S - 0.02 <= server.ended_s < 60.0 + 2 * PATIENCE_S


def test_a_request_that_is_always_lost_fails_alone_while_others_are_served() -> None:
    """A router answers so while the request is in quarantine, for it was in flight when workers died."""
    server = Server(0.0, a=[(0, LOST)] * 20, b=[(0.1, LOST), (0, FINE)])
    assert ask(server, "a", "b") == [(502, {"error": {"message": "lost"}}), (200, {"object": "text_completion"})]


def test_a_request_that_is_always_lost_does_not_wait_for_the_end_of_all_others() -> None:
    others = {f"c{i}": [(0.4 * i, BUSY), (0, FINE)] for i in range(1, 7)}
    lost, *served = ask(server := Server(0.0, a=[(0, LOST)] * 20, **others), "a", *others)
    assert lost == (502, {"error": {"message": "lost"}})
    assert served == [(200, {"object": "text_completion"})] * 6
    assert server.ended_s > 3 * PATIENCE_S
    assert server.asked_s["a"] < 2 * PATIENCE_S


@pytest.mark.parametrize("status", [429, 503])
def test_a_request_that_is_refused_while_all_others_are_served_fails_alone_when_they_are_done(status: int) -> None:
    never = httpx.Response(status, json={"error": {"message": "not this one"}})
    server = Server(0.0, a=[(0, never)] * 60, b=[(0.5, BUSY), (0, FINE)], c=[(0.9, BUSY), (0.1, FINE)])
    refused, *served = ask(server, "a", "b", "c")
    assert refused == (status, {"error": {"message": "not this one"}})
    assert served == [(200, {"object": "text_completion"})] * 2
    assert 0.9 + PATIENCE_S < server.ended_s < 0.9 + 2 * PATIENCE_S


def test_a_server_busy_with_others_comes_to_this_one_too_however_long_that_takes() -> None:
    others = {f"c{i}": [(0.4 * i, BUSY), (0, FINE)] for i in range(1, 7)}
    got = ask(server := Server(0.0, a=[*[(0.3, BUSY)] * 5, (0, FINE)], **others), "a", *others)
    assert got == [(200, {"object": "text_completion"})] * 7
    assert server.ended_s > 3 * PATIENCE_S


def test_a_server_that_is_long_over_another_one_comes_to_this_one_too() -> None:
    server = Server(0.0, a=[*[(0, BUSY)] * 8, (0, FINE)], b=[(2.0, FINE)])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2
    assert server.asked_s["a"] > 2.0


def test_a_server_that_has_just_taken_another_one_is_not_away() -> None:
    server = Server(0.0, a=[*[(0, BUSY)] * 9, (0, FINE)], b=[*[(0.05, BUSY)] * 4, (2.0, FINE)])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2
    assert PATIENCE_S / 2 < server.asked_s["b"] < PATIENCE_S
    assert server.asked_s["a"] > 2.0 + server.asked_s["b"]


def test_a_server_that_was_long_over_another_one_has_the_whole_patience_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only worker went down with that one, and is back in less."""
    monkeypatch.setattr("jdisagg.batch.tries.LONGEST_PAUSE_S", 0.05)

    class Restarting(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            response = await super().__call__(request)
            return FINE if response is BUSY and now_s() - BEGAN_S > 2.4 else response

    server = Restarting(0.0, a=[(0, BUSY)] * 90, b=[(2.0, BUSY), *[(0, BUSY)] * 20])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2


def test_who_is_refused_is_not_passed_over_where_nobody_was_served_but_a_wrong_request_refused() -> None:
    outcomes = ask(server := Server(0.0, a=[(0, BUSY)] * 60, b=[(0, BUSY), (0, WRONG)]), "a", "b")
    assert isinstance(outcomes[0], Unavailable)
    assert outcomes[1] == (400, {"error": {"message": "too long"}})
    assert PATIENCE_S <= server.ended_s < 2 * PATIENCE_S


def test_an_answer_counts_when_it_came_and_not_when_it_was_asked_for() -> None:
    server = Server(0.0, a=[*[(0, BUSY)] * 6, (0, FINE)], b=[(0.5, FINE)])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2
    assert server.asked_s["a"] > 2 * 0.5


def test_an_outage_in_which_answers_still_come_is_none() -> None:
    class Deaf(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.method == "GET" and now_s() - BEGAN_S < 1.0:
                raise httpx.ConnectTimeout("")
            return await super().__call__(request)

    server = Deaf(0.0, a=[(0, DROPPED), (0, FINE)], b=[(0.5, FINE)])
    assert ask(server, "a", "b") == [(200, {"object": "text_completion"})] * 2
    assert server.asked_s["a"] >= 1.0


def test_requests_that_are_refused_after_a_while_do_not_keep_each_other_waiting() -> None:
    """As by a router that waits for a worker each time."""
    errors = ask(server := Server(0.0, a=[(0.1, BUSY)] * 20, b=[(0.11, BUSY)] * 20), "a", "b")
    assert [type(error) for error in errors] == [Unavailable] * 2
    assert server.ended_s < 2 * PATIENCE_S


def test_a_key_that_is_no_longer_taken_stops_the_batch_and_is_no_line_s_fault() -> None:
    refused = httpx.Response(401, json={"error": {"message": "wrong key"}})
    (error,) = ask(Server(0.0, a=[(0, refused)]), "a")
    assert isinstance(error, Unavailable)
    assert "set JDISAGG_API_KEY to the one it wants, then run the same command again" in error.message
    assert "wrong key" in error.message


def test_a_server_that_comes_back_with_another_key_is_not_waited_for() -> None:
    class Locked(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                return httpx.Response(401, json={"error": {"message": "wrong key"}})
            return await super().__call__(request)

    (error,) = ask(server := Locked(0.0, a=[(0, httpx.ReadError("")), (0, FINE)]), "a")
    assert isinstance(error, Unavailable)
    assert "refuses the API key" in error.message
    assert "wrong key" in error.message
    assert server.ended_s < PATIENCE_S


def test_what_a_server_that_is_not_there_says_is_told() -> None:
    class Loading(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(500) if request.method == "GET" else await super().__call__(request)

    (error,) = ask(Loading(0.0, a=[(0, httpx.ReadError(""))]), "a")
    assert isinstance(error, Unavailable)
    assert "ReadError; then /v1/models answered HTTP 500" in error.message


@pytest.mark.parametrize("away_s", [0.0, 0.3])
def test_a_request_that_the_server_never_survives_fails_alone_though_the_server_is_away_for_a_while(away_s: float) -> None:
    (error,) = ask(Server(away_s, a=[(0, DROPPED)] * 20), "a")
    assert isinstance(error, BadAnswer)
    assert "took the request 5 times" in error.message


def test_a_server_that_never_comes_back_stops_the_batch() -> None:
    (error,) = ask(Server(60.0, a=[(0, DROPPED)]), "a")
    assert isinstance(error, Unavailable)
    assert error.message.startswith("line 1: no answer for 0.6 s: RemoteProtocolError: Server disconnected")
    assert "; then ConnectError: refused" in error.message


def test_a_server_that_comes_back_is_noticed_soon() -> None:
    assert ask(server := Server(0.25, a=[(0, DROPPED), (0, FINE)]), "a") == [(200, {"object": "text_completion"})]
    assert server.ended_s < 0.4


def test_a_server_that_takes_a_probe_and_never_answers_it_is_away() -> None:
    """It is not waited for as long as for the answer of a request."""

    class Stuck(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                await asyncio.sleep(request.extensions["timeout"]["read"])
                raise httpx.ReadTimeout("")
            return await super().__call__(request)

    (error,) = ask(server := Stuck(0.0, a=[(0, DROPPED)]), "a")
    assert isinstance(error, Unavailable)
    assert server.ended_s < 60


def test_a_wait_is_told_of_once_however_many_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tests.unit.batch.test_patience.PATIENCE_S", 70.0)
    outcomes = ask(Server(0.0, a=[(0, BUSY)] * 40, b=[(0, BUSY)] * 40), "a", "b")
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 2
    told, *again = [record.getMessage() for record in caplog.records]
    assert told.startswith('line 1: HTTP 503: {"error":{"message":"busy"}}; waiting for the server, up to 6')
    assert len(again) == 2, "one every 30 s"


def test_a_short_wait_is_nobody_s_business(caplog: pytest.LogCaptureFixture) -> None:
    ask(Server(0.0, a=[(0, BUSY), (0, FINE)]), "a")
    assert not caplog.records
