"""A gRPC client of GenerationService for tests: records every token with its arrival time."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio

from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc

OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


@dataclass(kw_only=True)
class Asked:
    """One client request."""

    prompt: tuple[int, ...] | str
    n: int = 1
    stop: tuple[str, ...] = ()
    sampling: dict[str, object] = field(default_factory=dict)
    request_id: str = ""
    deadline_s: float = 120.0
    priority: int = 0

    def message(self) -> generation_pb2.GenerateRequest:
        """As proto."""
        prompt = (
            {"text": self.prompt} if isinstance(self.prompt, str) else {"token_ids": generation_pb2.TokenIds(ids=self.prompt)}
        )
        return generation_pb2.GenerateRequest(
            request_id=self.request_id,
            sampling=common_pb2.SamplingParams(**self.sampling),
            n=self.n,
            stop=self.stop,
            priority=self.priority,
            **prompt,
        )


@dataclass(kw_only=True)
class Got:
    """What came back, per choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    top_gaps: dict[int, list[float]] = field(default_factory=dict)  # nats between the two best tokens, if asked for
    times_s: dict[int, list[float]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    complete: generation_pb2.Complete | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def largest_gap_s(self) -> float:
        """Largest time between two tokens of one choice."""
        gaps = [b - a for times in self.times_s.values() for a, b in itertools.pairwise(times)]
        return max(gaps, default=0.0)

    def essence(self) -> tuple[object, ...]:
        """What must be equal between two ways of serving the same request."""
        return (self.tokens, self.text, self.finish)

    def take(self, delta: generation_pb2.Delta) -> None:
        """Add one delta."""
        index = delta.index
        self.tokens.setdefault(index, []).extend(delta.token_ids)
        self.logprobs.setdefault(index, []).extend(entry.logprob for entry in delta.logprobs)
        gaps = [entry.top[0].logprob - entry.top[1].logprob for entry in delta.logprobs if len(entry.top) > 1]
        self.top_gaps.setdefault(index, []).extend(gaps)
        if delta.token_ids:
            self.times_s.setdefault(index, []).append(time.monotonic())
        self.text[index] = self.text.get(index, "") + delta.text
        if delta.finish:
            self.finish[index] = delta.finish


async def generate(channel: grpc.aio.Channel, asked: Asked) -> Got:
    """Run one request to its end; errors are kept in the result."""
    got = Got()
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked.message(), timeout=asked.deadline_s)
    try:
        async for response in call:
            if response.HasField("delta"):
                got.take(response.delta)
            else:
                assert got.complete is None, "two Complete messages"
                got.complete = response.complete
    except grpc.aio.AioRpcError as error:
        got.error = error
    return got


async def generate_all(address: str, requests: list[Asked], *, at_once: int = 16) -> list[Got]:
    """Run many requests, at most `at_once` together, in order of arrival."""
    limit = asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:

        async def one(asked: Asked) -> Got:
            async with limit:
                return await generate(channel, asked)

        return await asyncio.gather(*(one(asked) for asked in requests))


def run_all(address: str, requests: list[Asked], *, at_once: int = 16, timeout_s: float = 200.0) -> list[Got]:
    """`generate_all` from plain code, bounded in time."""
    return asyncio.run(asyncio.wait_for(generate_all(address, requests, at_once=at_once), timeout_s))
