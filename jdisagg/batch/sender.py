"""Sends one request to an OpenAI-compatible server (a socket, or an application in this process) and waits out busy ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import inf

import httpx

from jdisagg.batch.answers import SHOWN_BYTES, read_answer, retry_after_s, shown
from jdisagg.batch.awake import AwakeClock, Moment
from jdisagg.batch.lines import Call
from jdisagg.batch.service import MOST_LOST, Service
from jdisagg.batch.tries import Absence, Answer, BadAnswer, NotNow, Tries
from jdisagg.batch.turns import Turns
from jdisagg.core.errors import ConfigError, Unavailable
from jdisagg.core.settings import API_KEY_VARIABLE

log = logging.getLogger(__name__)

UNAUTHENTICATED = 401
LOST = 502  # on its way, or by workers that went down with it
LATE = 504  # its time is over
RETRIED = frozenset({429, LOST, 503})  # "not now"
PROBE_TIMEOUT_S = 10.0
AT_THE_DOOR_S = 1.0  # who is refused sooner was not in flight: its prompt is in quarantine, and as many may be that come next
SILENT_S, TOLD_EVERY_S = 1.0, 30.0  # a wait is told of when it has lasted that long, whichever request's it is; and so often


class Sender:
    """Requests of one batch. Use from one event loop."""

    def __init__(self, client: httpx.AsyncClient, *, patience_s: float) -> None:
        """`patience_s`: how long a server may be unreachable or refuse before the batch stops, or lose a request."""
        self._client = client
        self._patience_s = patience_s
        self._clock = AwakeClock()  # time in which this process stands still is no absence of the server's
        self._turns = Turns(self._clock.now_s)
        self._service = Service(self._turns, patience_s)
        self._told_s = -inf  # of a wait
        self._speaks_http = False  # as far as is known

    async def send(self, call: Call, request_id: str, set_aside: Callable[[], object] = lambda: None) -> Answer:
        """(HTTP status, body) of the answer; 502 when a server that is there lost this request for `patience_s`, or once more
        behind a quarantine, 429 or 503 when it served everybody else and then nobody for so long.

        `request_id` becomes part of the one in the server's logs. `set_aside()`, which may be called again: it waits for all
        others from now on. Raises BadAnswer, and Unavailable when the server stays away so long or refuses the API key,
        which is no request's fault, ConfigError when there is a server of something else than HTTP."""
        named = {"X-Request-Id": request_id}
        request = self._client.build_request("POST", call.url, json=call.body, headers=named)
        answer = await self._insist(f"line {call.number}", request, set_aside)
        if answer[0] == UNAUTHENTICATED:
            raise _refused_key(str(answer[1])[:SHOWN_BYTES])
        return answer

    async def get(self, path: str) -> Answer:
        """Likewise, of a GET."""
        return await self._insist(path, self._client.build_request("GET", path))

    async def _insist(self, what: str, request: httpx.Request, set_aside: Callable[[], object] = lambda: None) -> Answer:
        tries, absence = Tries(), None
        with self._clock.watched():
            while True:
                queued_s, long_s = self._clock.now_s(), self._turns.long_s
                async with self._turn(tries, set_aside):
                    sent = self._clock.moment()
                    if absence is not None:  # it stood behind one that was computed; behind refusals time goes on
                        absence.since_s += min(sent.awake_s - queued_s, self._turns.long_s - long_s)
                    outcome = await self._once(request, sent)
                    in_flight_s = self._clock.now_s() - sent.awake_s
                    if not isinstance(outcome, NotNow):
                        self._service.answered(outcome[0], sent.awake_s, self._clock.now_s())
                        return outcome
                    was_away = (outcome.taken or outcome.lost) and await self._come_back(what, outcome.why)
                if outcome.taken or (was_away and not outcome.quarantined):
                    absence, kept = None, tries.add(outcome)
                elif outcome.lost:
                    if outcome.quarantined and in_flight_s >= AT_THE_DOOR_S:
                        set_aside()
                    absence, kept = None, await self._rest(tries, what, outcome)
                else:
                    absence = absence or Absence(self._clock.now_s())
                    kept = await self._wait_out(absence, what, outcome)
                if kept is not None:
                    return kept

    def _turn(self, tries: Tries, set_aside: Callable[[], object]) -> AbstractAsyncContextManager[None]:
        if tries.is_quarantined:
            set_aside()
            return self._turns.alone()
        return self._turns.one_by_one() if tries.is_suspect else self._turns.beside_others()

    async def _come_back(self, what: str, why: str) -> bool:
        """Wait until the server answers something; False: at once. Raises Unavailable when it stays away."""
        absence, was_away = Absence(self._clock.now_s()), False
        while away := await self._why_away():
            was_away = True
            silent_s = self._service.silent_s(absence.since_s, self._clock.now_s())
            await self._pause(absence.pause_s(), silent_s, what, f"{why}; then {away}")
        return was_away

    async def _rest(self, tries: Tries, what: str, outcome: NotNow) -> Answer | None:
        """Before a request that was lost is asked again. Returns the answer to keep when it was lost for long enough; raises
        Unavailable where that is so of many, and nobody is served."""
        now_s = self._clock.now_s()
        since_s = tries.lost_since_s(now_s)
        serves_nobody = self._service.unserved_s(since_s, now_s) >= self._patience_s
        pause_s = None if serves_nobody else tries.rest_s(outcome, self._patience_s)
        if pause_s is None:
            if self._service.lost_for_good(since_s, now_s):
                raise Unavailable(
                    f"{what}: {MOST_LOST} requests were lost, and none was served: {outcome.why}; "
                    "check the server's workers, then run the same command again to go on from here"
                )
            return outcome.answer
        if pause_s >= SILENT_S:
            how = "once more, beside nothing else, not before" if tries.is_quarantined else "again in"
            self._tell("%s: %s; asked %s %.0f s", what, outcome.why, how, pause_s)
        await asyncio.sleep(pause_s)
        return None

    async def _wait_out(self, absence: Absence, what: str, outcome: NotNow) -> Answer | None:
        """Before the server, which refused or was not there, is asked again. Returns the answer to keep, should it have gone on
        to serve others and then nobody for the patience; raises Unavailable where it served nobody."""
        now_s = self._clock.now_s()
        if outcome.answer is None:
            away_s = self._service.silent_s(absence.since_s, now_s)
        else:
            away_s = self._service.unserved_s(absence.since_s, now_s)
            if away_s >= self._patience_s and self._service.passed_over(absence.began_s):
                return outcome.answer
        await self._pause(absence.pause_s(outcome.retry_after_s), away_s, what, outcome.why)
        return None

    async def _pause(self, pause_s: float, away_s: float, what: str, why: str) -> None:
        """Sleep, at most to the end of the patience with a server that is away for so long. Raises Unavailable behind that."""
        left_s = self._patience_s - away_s
        if left_s <= 0:
            raise Unavailable(
                f"{what}: no answer for {self._patience_s:g} s: {why}; "
                "check the server, then run the same command again to go on from here"
            )
        if away_s >= SILENT_S:
            self._tell("%s: %s; waiting for the server, up to %.0f s more", what, why, left_s)
        await asyncio.sleep(min(pause_s, left_s))

    def _tell(self, text: str, *told: object) -> None:
        """Of a wait, whichever request's it is."""
        now_s = self._clock.now_s()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            log.warning(text, *told)

    async def _once(self, request: httpx.Request, sent: Moment) -> Answer | NotNow:
        """The answer, or why to try again. Requests carry their seed, so sending one twice does no harm."""
        limit_s = request.extensions["timeout"]["read"] or inf
        try:
            response = await self._client.send(request)
        except httpx.TransportError as error:
            self._check_http(error)
            taken = isinstance(error, httpx.ReadTimeout | httpx.ReadError | httpx.RemoteProtocolError)
            timed_out, stood_still = isinstance(error, httpx.ReadTimeout), self._clock.stood_still(sent, limit_s)
            return NotNow(_told(error), taken, timed_out, stood_still)
        except httpx.DecodingError as error:
            raise BadAnswer(f"the server's answer cannot be unpacked: {error}") from error
        self._speaks_http = True
        answer = read_answer(response)
        why = f"HTTP {response.status_code}: {shown(response.content)}"
        if response.status_code in RETRIED:
            lost = response.status_code == LOST
            quarantined = lost and response.headers.get("x-should-retry") == "false"
            wait_s = retry_after_s(response)
            return NotNow(why, lost=lost, quarantined=quarantined, retry_after_s=wait_s, answer=answer)
        if response.status_code == LATE and self._clock.stood_still(sent, limit_s):
            return NotNow(why, taken=True, timed_out=True, stood_still=True, answer=answer)
        return answer

    async def _why_away(self) -> str:
        """Why the server is not there; "" = it is. Raises Unavailable when it refuses the API key, ConfigError as `send`."""
        try:
            response = await self._client.get("/v1/models", timeout=PROBE_TIMEOUT_S)
        except (httpx.TransportError, httpx.DecodingError) as error:
            self._check_http(error)
            return _told(error)
        self._speaks_http = True
        if response.status_code == UNAUTHENTICATED:
            raise _refused_key(shown(response.content))
        return "" if response.is_success else f"/v1/models answered HTTP {response.status_code}"

    def _check_http(self, error: httpx.HTTPError) -> None:
        """Raise ConfigError for bytes that no HTTP begins with, of a server that has said nothing else: no waiting mends it."""
        if not self._speaks_http and _is_no_http(error):
            raise ConfigError(f"--server: {_told(error)}; give the URL of a server's HTTP port (--port)") from error


@dataclass(frozen=True)
class Served:
    """The model that answers."""

    name: str
    fingerprint: str | None  # of its weights and settings; None = the server does not tell
    others: tuple[str, ...] = ()  # that the server has beside it

    def may_have_answered_as(self, other: Served) -> bool:
        """Nothing is known that tells the two apart."""
        if self.name != other.name:
            return other.name in self.others
        return None in (self.fingerprint, other.fingerprint) or self.fingerprint == other.fingerprint


async def served_model(sender: Sender) -> Served:
    """The server's (first) model. Raises ConfigError when it does not say."""
    try:
        status_code, body = await sender.get("/v1/models")
    except BadAnswer as error:
        raise ConfigError(f"--server: /v1/models: {error.message}") from error
    if status_code == UNAUTHENTICATED:
        raise ConfigError(f"--server: it refuses the API key: set {API_KEY_VARIABLE} to the one it wants; {str(body)[:200]}")
    models = body.get("data")
    first, *rest = models if isinstance(models, list) and models else [None]
    if status_code != 200 or not isinstance(first, dict) or "id" not in first:
        raise ConfigError(f"--server: /v1/models answered HTTP {status_code}: {str(body)[:200]}")
    fingerprint = first.get("fingerprint")
    others = tuple(str(one["id"]) for one in rest if isinstance(one, dict) and "id" in one)
    return Served(str(first["id"]), fingerprint if isinstance(fingerprint, str) else None, others)


def _refused_key(said: str) -> Unavailable:
    advice = f"set {API_KEY_VARIABLE} to the one it wants, then run the same command again to go on from here"
    return Unavailable(f"the server refuses the API key: {advice}; {said}")


def _told(error: httpx.HTTPError) -> str:
    hint = " (no HTTP: a gRPC port?)" if _is_no_http(error) else ""
    return f"{type(error).__name__}: {error}".removesuffix(": ") + hint


def _is_no_http(error: httpx.HTTPError) -> bool:
    return "illegal request line" in str(error)  # h11's word for bytes, of answers, too
