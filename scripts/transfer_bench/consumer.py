"""The consuming side, in the benchmark's own process: opens streams, fetches what is announced, acknowledges what arrived."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter, process_time
from typing import Any

from bench_kit.child import START_S, Child, child
from bench_kit.child import STEP_S as ASK_S

from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.core.requests import EngineRequest, SamplingParams
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import Ack, ChunkReady, HandoffId, Open, StreamEnded
from jdisagg.transfer.base import PieceArrived, PieceFailed
from transfer_bench.parts import PATIENT, Form, identity, make_fetcher
from transfer_bench.producer import CPU, produce

STEP_S = 60.0


@dataclass(frozen=True)
class Moved:
    """One transfer."""

    num_bytes: int
    seconds: float
    cpu_p_s: float
    cpu_d_s: float


class Consumer:
    """Connected to one producer."""

    def __init__(
        self, form: Form, address: str, producer: Child, loop: asyncio.AbstractEventLoop, *, wait_s: float = inf
    ) -> None:
        """No answer is waited for longer than `wait_s`."""
        self._form = form
        self._address = address
        self._producer = producer
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fetcher = make_fetcher(form, self._inbox.put)
        self._peers = GrpcPeerClient(identity("D", form.backend), loop=loop, post=self._inbox.put, config=PATIENT)
        self._serial = 0
        self._step_s, self._ask_s = min(STEP_S, wait_s), min(ASK_S, wait_s)

    def _open(self, num_pieces: int) -> HandoffId:
        self._serial += 1
        handoff = HandoffId("bench", self._serial)
        request = EngineRequest(
            request_id="bench", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=2), deadline_s=monotonic() + 600
        )
        self._peers.open(self._address, handoff, Open(request=request, held_tokens=num_pieces, backend=self._form.backend))
        return handoff

    def move(self, num_pieces: int) -> Moved:
        """Fetch so many pieces over one stream; from Open to the last piece confirmed on the device."""
        self._ask(num_pieces)
        before_p_s, before_d_s, began_s = self._ask(CPU), process_time(), perf_counter()
        handoff, left = self._open(num_pieces), num_pieces
        while left:
            match self._inbox.get(timeout=self._step_s):
                case FromPrefill(message=ChunkReady() as ready):
                    self._fetcher.fetch(handoff, self._address, ready, monotonic() + self._step_s)
                case PieceArrived(ready=ready):
                    left -= 1
                    self._peers.send(handoff, Ack(key=ready.key))
                case PieceFailed(reason=reason, detail=detail) | FromPrefill(message=StreamEnded(reason=reason, error=detail)):
                    raise RuntimeError(f"{self._form.backend}: {reason} {detail}")
        seconds, cpu_d_s = perf_counter() - began_s, process_time() - before_d_s
        cpu_p_s = self._ask(CPU) - before_p_s
        self._peers.close(handoff)
        return Moved(num_pieces * self._form.piece_bytes, seconds, cpu_p_s, cpu_d_s)

    def first_chunk_s(self) -> float:
        """From Open to the announcement of a piece that P has at hand."""
        self._ask(1)
        began_s = perf_counter()
        handoff = self._open(1)
        while True:
            match self._inbox.get(timeout=self._step_s):
                case FromPrefill(message=ChunkReady() as ready):
                    seconds = perf_counter() - began_s
                    self._peers.send(handoff, Ack(key=ready.key))
                    self._peers.close(handoff)
                    return seconds
                case FromPrefill(message=StreamEnded(reason=reason)):
                    raise RuntimeError(f"{self._form.backend}: the stream ended: {reason}")

    def _ask(self, what: object) -> Any:
        return self._producer.ask(what, self._ask_s)

    async def aclose(self) -> None:
        """End streams and threads."""
        await self._peers.aclose()
        await asyncio.to_thread(self._fetcher.close)


@contextmanager
def connected(form: Form, *, wait_s: float = inf) -> Iterator[Consumer]:
    """A producer in a process of its own and a consumer of it; no answer is waited for longer than `wait_s`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        with child(produce, form, start_s=min(START_S, wait_s)) as (producer, address):
            consumer = Consumer(form, address, producer, loop, wait_s=wait_s)
            try:
                yield consumer
            finally:
                asyncio.run_coroutine_threadsafe(consumer.aclose(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
