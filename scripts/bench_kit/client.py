"""Streams whose tokens are timed as they arrive, and counters of a worker."""

from __future__ import annotations

import itertools
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import grpc

from bench_kit.figures import longest_gap
from bench_kit.samples import samples
from jdisagg.api.channels import open_blocking_channel
from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc

METRICS_S = 60.0  # on a machine that stands still


@dataclass(kw_only=True)
class TimedStream:
    """One request. Times are of the monotonic clock, which processes of one machine share."""

    request_id: str
    sent_s: float
    token_s: list[float] = field(default_factory=list)  # when each token arrived
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.sent_s

    @property
    def second_s(self) -> float:
        """Time to the second token, from the start."""
        return self.token_s[1] - self.sent_s

    @property
    def gap_s(self) -> float:
        """First to second token: with disaggregation, what is left of the transfer and a decode step."""
        return self.token_s[1] - self.token_s[0]

    def longest_wait_s(self, since_s: float) -> float:
        """For a token that came after `since_s`: from the one before it, or from the question."""
        return longest_gap([self.sent_s, *self.token_s], since_s)


class Client:
    """One connection to one worker; any number of threads may use it. Close it."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """`timeout_s` is of one request."""
        self._channel = open_blocking_channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._address = address
        self._timeout_s = timeout_s
        self._ids = itertools.count()

    def run(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        seconds: float = inf,
        temperature: float = 0.0,
        seed: int = 0,
        cache_salt: str = "",
        on_first_token: Callable[[], object] = lambda: None,
    ) -> TimedStream:
        """Greedy unless there is a temperature, to the end or until `seconds` after its first token.

        Raises RuntimeError when it fails.
        """
        stream = TimedStream(request_id=f"bench-{next(self._ids)}", sent_s=time.monotonic())
        request = generation_pb2.GenerateRequest(
            request_id=stream.request_id,
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True),
            cache_salt=cache_salt,
        )
        call = self._stub.Generate(request, timeout=self._timeout_s)
        try:
            for response in call:
                is_first = not stream.token_s
                self._take(response, stream)
                if is_first and stream.token_s:
                    on_first_token()
                if stream.token_s and stream.token_s[-1] >= stream.token_s[0] + seconds:
                    call.cancel()
                    return stream
        except grpc.RpcError as error:
            text = f"{stream.request_id} at {self._address}: {call.code().name}: {call.details()}"
            raise RuntimeError(text) from error
        if len(stream.token_ids) != max_tokens:
            raise RuntimeError(f"{stream.request_id} at {self._address}: {len(stream.token_ids)} tokens, wanted {max_tokens}")
        return stream

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _take(self, response: generation_pb2.GenerateResponse, stream: TimedStream) -> None:
        if response.HasField("complete"):
            stream.cached_tokens = response.complete.usage.cached_tokens
            return
        stream.token_ids += response.delta.token_ids
        stream.token_s += [time.monotonic()] * len(response.delta.token_ids)


def read_samples(http_address: str) -> dict[str, float]:
    """Of a process's /metrics."""
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=METRICS_S) as response:
        return samples(response.read().decode())
