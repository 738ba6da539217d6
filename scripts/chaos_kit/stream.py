"""One stream of tokens as its client sees it: every arrival with its time, and how it ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import grpc
import grpc.aio
from bench_kit.figures import gaps, longest_gap

from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice
from chaos_kit.client import OPTIONS, is_transport
from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc

LIMIT_S = 60.0
LOST = "connection lost"  # by grpc itself: no server said so


@dataclass(kw_only=True, eq=False)
class Stream:
    """Choice 0 of one request over gRPC. Times are seconds of `monotonic`."""

    name: str  # its request id
    entry: Entry
    choice: Choice = field(default_factory=Choice)
    times_s: list[float] = field(default_factory=list)  # of arrivals, each of one token or more
    asked_s: float = 0.0
    ended_s: float | None = None
    error: str | None = None  # its name; None = ended well
    detail: str = ""
    provenance: common_pb2.Provenance | None = None
    on_tokens: Callable[[Stream], None] | None = None

    async def run(self, address: str) -> Stream:
        """From the question to the end, in at most LIMIT_S."""
        self.asked_s = monotonic()
        request = generation_pb2.GenerateRequest(
            request_id=self.name,
            token_ids=generation_pb2.TokenIds(ids=self.entry.prompt),
            sampling=self.entry.over_grpc,
            n=1,
            cache_salt=self.name,
        )
        try:
            async with asyncio.timeout(LIMIT_S + 5), grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
                call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=LIMIT_S)
                async for response in call:
                    self._take(response)
                if self.provenance is None:
                    self.error = "NO_COMPLETE"
        except grpc.aio.AioRpcError as error:
            self.detail = str(error.details())
            lost = error.code() is grpc.StatusCode.UNAVAILABLE and is_transport(self.detail)
            self.error = LOST if lost else error.code().name
        except TimeoutError:
            self.error = "HANG"
        self.ended_s = monotonic()
        return self

    def _take(self, response: generation_pb2.GenerateResponse) -> None:
        if response.HasField("complete"):
            self.provenance = response.complete.choices[0].provenance
            return
        self.choice.add(Choice.of(response.delta))
        if response.delta.token_ids:
            self.times_s.append(monotonic())
            if self.on_tokens is not None:
                self.on_tokens(self)

    @property
    def tokens(self) -> list[int]:
        """So far."""
        return self.choice.tokens

    @property
    def is_whole(self) -> bool:
        """Every token is there; its end may still be under way."""
        return len(self.tokens) == self.entry.max_tokens

    @property
    def recoveries(self) -> list[str]:
        """Rungs it took; empty while it has not ended."""
        return [] if self.provenance is None else list(self.provenance.recoveries)

    def became(self, wanted: Choice) -> str:
        """`exact`, the name of its error behind nothing but what is right, or the name of a flaw, in capitals."""
        if flaw := self.choice.flaw_beside(wanted, whole=self.error is None):
            return flaw.name
        return self.error or "exact"

    def gap_s(self, since_s: float) -> float:
        """The longest that its client waited for a token from `since_s` on: from the last token before, if there was one."""
        return longest_gap([since_s, *self.times_s], since_s)

    def tokens_before_gap(self, since_s: float) -> int:
        """Arrivals before the longest wait that ended after `since_s`."""
        steps = [(b - a, i + 1) for i, (a, b) in enumerate(itertools.pairwise(self.times_s)) if b > since_s]
        return max(steps, default=(0.0, 0))[1]

    def waits_s(self, since_s: float) -> list[float]:
        """Between its arrivals after `since_s`."""
        return gaps([time_s for time_s in self.times_s if time_s > since_s])
