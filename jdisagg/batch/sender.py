"""Sends one request to an OpenAI-compatible server (a socket, or an application in this process) and waits out busy ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

import httpx

from jdisagg.batch import strict_json
from jdisagg.batch.lines import Call
from jdisagg.core.errors import ConfigError, JdisaggError, Unavailable
from jdisagg.core.settings import API_KEY_VARIABLE

log = logging.getLogger(__name__)

UNAUTHENTICATED = 401
LOST = 502  # on its way, or by workers that went down with it
LATE = 504  # its time is over
RETRIED = frozenset({429, LOST, 503})  # "not now"
Answer = tuple[int, dict[str, Any]]  # HTTP status, JSON object
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MOST_TIMES_TAKEN = 5  # and not answered, by a server that was there each time afterwards
ALONE_FROM = 2  # times: once may be a restart, which is the fault of none of the many that it cut off
PROBE_TIMEOUT_S = 10.0
STOOD_STILL_S = 1.0  # that a sleep took longer than it was to: this process was stopped (Ctrl-Z, and fg), or starved
LOOK_S = 1.0  # between two looks at that
MUCH = 0.1  # of the time that a request took: so much in which this process stood still is why it is late
SILENT_S, TOLD_EVERY_S = 1.0, 30.0  # a wait is told of when it has lasted that long, whichever request's it is; and so often
_SHOWN_BYTES = 200  # of an answer that is quoted in a message


class BadAnswer(JdisaggError):
    """A server that is there answers this request with nothing that can be kept; ends it and no other."""


@dataclass(frozen=True)
class _NotNow:
    """Why to ask again."""

    why: str
    taken: bool = False  # the server had the request, then hung up or said nothing: it may be the request's fault
    timed_out: bool = False
    stood_still: bool = False  # this process did meanwhile: it is nobody's fault
    retry_after_s: float = 0.0  # the server says: not before
    answer: Answer | None = None  # to be kept, should the server go on to serve others and never this one


class Sender:
    """Requests of one batch. Use from one event loop."""

    def __init__(self, client: httpx.AsyncClient, *, patience_s: float) -> None:
        """`patience_s`: how long a server may be unreachable or refuse before the batch stops."""
        self._client = client
        self._patience_s = patience_s
        self._served_s = float("-inf")  # when the latest request that was answered had been sent
        self._told_s = float("-inf")  # of a wait
        self._still_s, self._woke_s = 0.0, float("-inf")  # for how long this process stood still, and when it last went on
        self._num_asking = 0
        self._looking: asyncio.Task[None] | None = None  # while somebody asks
        self._suspect = asyncio.Lock()  # of requests that may bring the server down one is asked at a time

    async def send(self, call: Call, request_id: str) -> Answer:
        """(HTTP status, body) of the answer; 502 when the server lost this request for `patience_s` and served later ones, 429
        or 503 when it served everybody else and then nobody for so long.

        `request_id` becomes part of the one in the server's logs. Raises BadAnswer, and Unavailable when the server stays away
        so long or refuses the API key, which is no request's fault."""
        named = {"X-Request-Id": request_id}
        request = self._client.build_request("POST", call.url, json=call.body, headers=named)
        with self._looked_at():
            answer = await self._insist(f"line {call.number}", request)
        if answer[0] == UNAUTHENTICATED:
            raise _refused_key(str(answer[1])[:_SHOWN_BYTES])
        return answer

    async def get(self, path: str) -> Answer:
        """Likewise, of a GET."""
        with self._looked_at():
            return await self._insist(path, self._client.build_request("GET", path))

    async def _insist(self, what: str, request: httpx.Request) -> Answer:
        refused_since_s, times_taken, times_still, pause_s = None, 0, 0, FIRST_PAUSE_S
        while True:
            queued_s = self._now_s()
            async with self._suspect if times_taken >= ALONE_FROM else nullcontext():
                if refused_since_s is not None:
                    refused_since_s += self._now_s() - queued_s
                sent_s = self._now_s()
                outcome = await self._once(request)
                if not isinstance(outcome, _NotNow):
                    self._served_s = max(self._served_s, sent_s)
                    return outcome
                if outcome.taken:
                    await self._come_back(what, outcome.why)
            if outcome.taken:
                if outcome.stood_still and times_still < MOST_TIMES_TAKEN:
                    times_still += 1
                else:
                    times_taken += 1
                    if outcome.answer is not None:
                        return outcome.answer
                    if outcome.timed_out or times_taken == MOST_TIMES_TAKEN:
                        told = f"the server took the request {times_taken} times and answered others only: {outcome.why}"
                        raise BadAnswer(told)
                refused_since_s, pause_s = None, FIRST_PAUSE_S
                continue
            refused_since_s = self._now_s() if refused_since_s is None else refused_since_s
            # a server that is busy with others will come to this one, too; one that loses it will lose it again
            is_lost = outcome.answer is not None and outcome.answer[0] == LOST
            since_s = refused_since_s if is_lost else max(refused_since_s, self._served_s)
            if outcome.answer is not None and refused_since_s < self._served_s and since_s < self._now_s() - self._patience_s:
                return outcome.answer
            await self._pause(max(pause_s, outcome.retry_after_s), since_s, what, outcome.why)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _come_back(self, what: str, why: str) -> None:
        """Wait until the server answers something. Raises Unavailable when it stays away."""
        since_s, pause_s = self._now_s(), FIRST_PAUSE_S
        while away := await self._why_away():
            await self._pause(pause_s, since_s, what, f"{why}; then {away}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _pause(self, pause_s: float, since_s: float, what: str, why: str) -> None:
        """Sleep, at most to the end of the patience with a server that is away since then. Raises Unavailable behind that."""
        left_s = since_s + self._patience_s - self._now_s()
        if left_s <= 0:
            raise Unavailable(
                f"{what}: no answer for {self._patience_s:g} s: {why}; "
                "check the server, then run the same command again to go on from here"
            )
        now_s = self._now_s()
        if now_s - since_s >= SILENT_S and now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            log.warning("%s: %s; waiting for the server, up to %.0f s more", what, why, left_s)
        await self._sleep(min(pause_s, left_s))

    def _now_s(self) -> float:
        """By a clock that stands still while this process does: that is no absence of the server's."""
        return monotonic() - self._still_s

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """Whoever asks knows whether this process stands still meanwhile."""
        self._num_asking += 1
        self._looking = self._looking or asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._num_asking -= 1
            if not self._num_asking:
                self._looking.cancel()
                self._looking = None

    async def _look(self) -> None:
        while True:
            await self._sleep(LOOK_S)

    async def _sleep(self, seconds: float) -> None:
        due_s = monotonic() + seconds
        await asyncio.sleep(seconds)
        if (woke_s := monotonic()) - due_s >= STOOD_STILL_S:
            self._still_s += woke_s - max(due_s, self._woke_s)  # others slept, too
            self._woke_s = woke_s

    async def _once(self, request: httpx.Request) -> Answer | _NotNow:
        """The answer, or why to try again. Requests carry their seed, so sending one twice does no harm."""
        sent_s, still_s = monotonic(), self._still_s
        try:
            response = await self._client.send(request)
        except httpx.TransportError as error:
            taken = isinstance(error, httpx.ReadTimeout | httpx.ReadError | httpx.RemoteProtocolError)
            stood_still = await self._stood_still(request, sent_s, still_s)
            return _NotNow(_told(error), taken, isinstance(error, httpx.ReadTimeout), stood_still)
        except httpx.DecodingError as error:
            raise BadAnswer(f"the server's answer cannot be unpacked: {error}") from error
        why = f"HTTP {response.status_code}: {_shown(response.content)}"
        if response.status_code in RETRIED:
            return _NotNow(why, retry_after_s=_retry_after_s(response), answer=_read_answer(response))
        if response.status_code == LATE and await self._stood_still(request, sent_s, still_s):
            return _NotNow(why, taken=True, stood_still=True, answer=_read_answer(response))
        return _read_answer(response)

    async def _stood_still(self, request: httpx.Request, since_s: float, before_s: float) -> bool:
        """Whether this process did for much of the time since then, when it had for `before_s` in all, or for so long that the
        request had not all of its time."""
        await asyncio.sleep(0)  # who looks at that wakes in the same turn of the loop, perhaps behind us
        took_s, still_s = monotonic() - since_s, self._still_s - before_s
        limit_s = request.extensions["timeout"]["read"] or inf
        return still_s > MUCH * took_s or took_s - still_s < limit_s <= took_s

    async def _why_away(self) -> str:
        """Why the server is not there; "" = it is. Raises Unavailable when it refuses the API key."""
        try:
            response = await self._client.get("/v1/models", timeout=PROBE_TIMEOUT_S)
        except (httpx.TransportError, httpx.DecodingError) as error:
            return _told(error)
        if response.status_code == UNAUTHENTICATED:
            raise _refused_key(_shown(response.content))
        return "" if response.is_success else f"/v1/models answered HTTP {response.status_code}"


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
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _retry_after_s(response: httpx.Response) -> float:
    """0 where it does not say, or names a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdecimal() else 0.0


def _read_answer(response: httpx.Response) -> Answer:
    """Raises BadAnswer for a success that cannot be kept."""
    try:
        return response.status_code, _read_object(response.content)
    except BadAnswer as error:
        if response.is_success:
            raise
        return response.status_code, {"error": {"message": error.message, "type": error.kind}}


def _read_object(content: bytes) -> dict[str, Any]:
    try:
        body = strict_json.decode(content)
    except ValueError as error:
        raise BadAnswer(f"the server answered no JSON object: {error}: {_shown(content)}") from error
    if not isinstance(body, dict):
        raise BadAnswer(f"the server answered no JSON object: {_shown(content)}")
    if flaw := strict_json.flaw(body):
        raise BadAnswer(f"the server's answer cannot be kept as JSON: {flaw}")
    return body


def _shown(content: bytes) -> str:
    return content[:_SHOWN_BYTES].decode(errors="replace") or "(nothing)"
