"""Clients that speak gRPC or HTTP, may go away early, and send again elsewhere when the router they spoke to dies."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import httpx

from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice
from chaos_kit.member import Member
from chaos_kit.outcome import Fate, Outcome
from jdisagg.v1 import generation_pb2, generation_pb2_grpc

OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
HANG_GRACE_S = 5.0  # behind the deadline
RESEND_PAUSE_S = 0.05
TRANSPORT = "TRANSPORT"  # the connection failed, as opposed to an answer that says so
HANG, TOO_LATE = "HANG", "DEADLINE_EXCEEDED"  # no answer came in time; over gRPC the latter may be one


class Clients:
    """Everybody's connections. Lives on one event loop."""

    def __init__(self, pick: Callable[[int], Member], http: httpx.AsyncClient) -> None:
        """`pick`: the router for the n-th call, one that is up if any is."""
        self._pick = pick
        self._http = http
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}  # by router and incarnation

    async def close(self) -> None:
        """Close the shared channels."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    async def run(self, outcome: Outcome, entry: Entry, deadline_s: float) -> None:
        """Carry one visit to its end, in at most `deadline_s` and a grace; everything is noted in `outcome`."""
        began_s = monotonic()
        try:
            async with asyncio.timeout(deadline_s + HANG_GRACE_S):
                await self._until_answered(outcome, entry, began_s + deadline_s)
        except TimeoutError:
            outcome.hung, outcome.error = True, HANG
        now_s = monotonic()
        outcome.seconds, outcome.silent_s = now_s - began_s, now_s - (outcome.last_s or began_s)

    async def _until_answered(self, outcome: Outcome, entry: Entry, end_s: float) -> None:
        while True:
            router = self._pick(outcome.visit.number + outcome.times_sent)
            incarnation, before = router.incarnation, outcome.choices
            outcome.send()
            left_s = end_s - monotonic()
            attempt = self._over_http if outcome.visit.over_http else self._over_grpc
            await attempt(router, outcome, entry, max(0.0, left_s))
            outcome.changed |= outcome.well and any(
                outcome.tokens_of(index)[: len(part.tokens)] != part.tokens for index, part in before.items()
            )
            router_died = router.incarnation != incarnation or not router.up
            if outcome.error != TRANSPORT or outcome.went_away or not router_died or monotonic() >= end_s:
                return
            await asyncio.sleep(RESEND_PAUSE_S)

    # --- gRPC

    async def _over_grpc(self, router: Member, outcome: Outcome, entry: Entry, left_s: float) -> None:
        if outcome.visit.fate is not Fate.LEAVES:
            await self._call(self._channel(router), outcome, entry, left_s)
            return
        async with grpc.aio.insecure_channel(router.grpc, options=OPTIONS) as own:
            task = asyncio.create_task(self._call(own, outcome, entry, left_s))
            await asyncio.wait({task}, timeout=outcome.visit.after_s)
            outcome.went_away = not task.done()
            await own.close()
            await task

    def _channel(self, router: Member) -> grpc.aio.Channel:
        key = (router.name, router.incarnation)
        if key not in self._channels:
            self._channels[key] = grpc.aio.insecure_channel(router.grpc, options=OPTIONS)
        return self._channels[key]

    async def _call(self, channel: grpc.aio.Channel, outcome: Outcome, entry: Entry, left_s: float) -> None:
        visit, stub = outcome.visit, generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            request_id=f"chaos-{visit.number}-{outcome.times_sent}",
            token_ids=generation_pb2.TokenIds(ids=entry.prompt),
            sampling=entry.over_grpc,
            n=entry.n,
            stop=entry.stop,
            priority=visit.priority,
            cache_salt=visit.cache_salt,
        )
        call = stub.Generate(request, timeout=left_s)
        task = asyncio.create_task(_read(call, outcome))
        try:
            if visit.fate in (Fate.CANCELS, Fate.ABORTS):
                await asyncio.wait({task}, timeout=visit.after_s)
                outcome.went_away = not task.done()
                if visit.fate is Fate.ABORTS:
                    await stub.Abort(generation_pb2.AbortRequest(request_id=request.request_id), timeout=10)
                else:
                    call.cancel()
            await task
        except grpc.aio.AioRpcError as error:
            outcome.detail = str(error.details())
            lost = error.code() is grpc.StatusCode.UNAVAILABLE and is_transport(outcome.detail)
            outcome.error = TRANSPORT if lost else error.code().name
        except grpc.aio.UsageError as error:  # the channel was closed below the call
            outcome.error, outcome.detail = "CLOSED", str(error)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            outcome.error = "CANCELLED"
        finally:
            task.cancel()
            call.cancel()
        if outcome.error is None and outcome.complete is None:
            outcome.error = "NO_COMPLETE"

    # --- HTTP

    async def _over_http(self, router: Member, outcome: Outcome, entry: Entry, left_s: float) -> None:
        visit = outcome.visit
        body = {**entry.over_http, "prompt": entry.prompt, "n": entry.n, "stop": entry.stop, "priority": visit.priority}
        body |= {"stream": visit.stream, "return_token_ids": True, "cache_salt": visit.cache_salt}
        body |= {"return_tokens_as_token_ids": True}  # texts may be shared by several
        body |= {"stream_options": {"include_usage": True}} if visit.stream else {}
        leaves = visit.fate is not Fate.STAYS
        url = f"http://{router.http}/v1/completions"
        try:
            async with asyncio.timeout(min(left_s, visit.after_s) if leaves else left_s):
                async with self._http.stream("POST", url, json=body, timeout=None) as response:
                    if response.status_code != 200:
                        _take_error(json.loads(await response.aread()), outcome)
                    elif visit.stream:
                        await _read_events(response, outcome)
                    else:
                        _take(json.loads(await response.aread()), outcome)
        except TimeoutError:
            outcome.went_away = leaves
            outcome.error = None if leaves else TOO_LATE
        except (httpx.HTTPError, ValueError) as error:  # or an answer that is no JSON
            outcome.error, outcome.detail = TRANSPORT, f"{type(error).__name__}: {error}"
        ended = [choice for choice in outcome.choices.values() if choice.finish]
        if outcome.error is None and not outcome.went_away and len(ended) != entry.n:
            outcome.error, outcome.detail = TRANSPORT, f"{len(ended)} of {entry.n} choices have ended"


async def _read(call: Any, outcome: Outcome) -> None:
    async for response in call:
        if response.HasField("complete"):
            outcome.complete = {part.index: Choice.of(part) for part in response.complete.choices}
            usage = response.complete.usage
            outcome.usage = usage.prompt_tokens, usage.completion_tokens
        else:
            outcome.take(response.delta.index, Choice.of(response.delta))


async def _read_events(response: httpx.Response, outcome: Outcome) -> None:
    is_done = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            _take(json.loads(line.removeprefix("data: ")), outcome)
    if not is_done and outcome.error is None:
        outcome.error, outcome.detail = TRANSPORT, "the stream ended without [DONE]"


def _take(message: dict[str, Any], outcome: Outcome) -> None:
    if "error" in message:
        _take_error(message, outcome)
    if usage := message.get("usage"):
        outcome.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for part in message.get("choices", ()):
        scored = part.get("logprobs") or {}
        scores = list(itertools.zip_longest(scored.get("token_logprobs") or (), scored.get("top_logprobs") or ()))
        outcome.take(part["index"], Choice(part["token_ids"] or [], part["text"], scores, part["finish_reason"]))


def _take_error(message: dict[str, Any], outcome: Outcome) -> None:
    error = message.get("error") or {}
    outcome.error = str(error.get("code") or error.get("type") or "ERROR").upper()
    outcome.detail = str(error.get("message"))


def is_transport(detail: str) -> bool:
    """Whether an UNAVAILABLE was written by grpc itself, not by a server."""
    texts = ("Socket closed", "failed to connect", "Connection reset", "connections to all backends", "recvmsg", "GOAWAY")
    return any(text.lower() in detail.lower() for text in texts)
