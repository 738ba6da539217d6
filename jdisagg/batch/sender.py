"""Sends one request to an OpenAI-compatible server (a socket, or an application in this process) and waits out busy ones."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import httpx

from jdisagg.batch import strict_json
from jdisagg.batch.lines import Call
from jdisagg.core.errors import ConfigError, JdisaggError, Unavailable

RETRIED = frozenset({429, 502, 503})  # "not now": the request was not run
Answer = tuple[int, dict[str, Any]]  # HTTP status, JSON object
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
_SHOWN_BYTES = 200  # of an answer that is quoted in a message


class BadAnswer(JdisaggError):
    """The server says that a request went well and answers no JSON object; ends that request and no other."""


class Sender:
    """Requests of one batch. Use from one event loop."""

    def __init__(self, client: httpx.AsyncClient, *, patience_s: float) -> None:
        """`patience_s`: how long a server may be unreachable or refuse before the batch stops."""
        self._client = client
        self._patience_s = patience_s

    async def send(self, call: Call) -> Answer:
        """(HTTP status, body) of the answer. Raises BadAnswer, and Unavailable when the server stays away for `patience_s`."""
        return await self._insist(f"line {call.number}", self._client.build_request("POST", call.url, json=call.body))

    async def get(self, path: str) -> Answer:
        """Likewise, of a GET."""
        return await self._insist(path, self._client.build_request("GET", path))

    async def _insist(self, what: str, request: httpx.Request) -> Answer:
        give_up_s = monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            outcome = await self._once(request)
            if not isinstance(outcome, str):
                return outcome
            if monotonic() + pause_s > give_up_s:
                raise Unavailable(
                    f"{what}: no answer for {self._patience_s:g} s: {outcome}; "
                    "check the server, then run the same command again to go on from here"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(self, request: httpx.Request) -> Answer | str:
        """The answer, or why to try again. Requests carry their seed, so sending one twice does no harm."""
        try:
            response = await self._client.send(request)
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        except httpx.DecodingError as error:
            raise BadAnswer(f"the server's answer cannot be unpacked: {error}") from error
        if response.status_code in RETRIED:
            return f"HTTP {response.status_code}: {_shown(response.content)}"
        try:
            return response.status_code, _read_object(response.content)
        except BadAnswer as error:
            if response.is_success:
                raise
            return response.status_code, {"error": {"message": error.message, "type": error.kind}}


async def served_model(sender: Sender) -> str:
    """The name of the server's (first) model. Raises ConfigError when it does not say."""
    try:
        status_code, body = await sender.get("/v1/models")
    except BadAnswer as error:
        raise ConfigError(f"--server: /v1/models: {error.message}") from error
    models = body.get("data")
    first = models[0] if isinstance(models, list) and models else None
    if status_code != 200 or not isinstance(first, dict) or "id" not in first:
        raise ConfigError(f"--server: /v1/models answered HTTP {status_code}: {str(body)[:200]}")
    return str(first["id"])


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
