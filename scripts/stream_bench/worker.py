"""A worker whose device is arithmetic: the real WorkerService and registration, tokens at any rate.

What it does per token is what a worker's host does between its committer and the wire: an Output, a message of it, one
RunResponse per step with all of them.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from multiprocessing.connection import Connection

import uvloop

from jdisagg.api.channels import bind, make_server
from jdisagg.api.fleet.client import FleetClient
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.config import TransferConfig
from jdisagg.core.fleet import Load, Member, ModelCard, Report
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role, TokenLogprob
from jdisagg.roles.ports import OutputSink
from jdisagg.serve.process import keep_what_is_there
from jdisagg.v1 import worker_pb2_grpc
from stream_bench.parts import DEAD_AFTER_S, HOST, MAX_MODEL_LEN, MODEL, token_at, tokenizer

IDLE_S = 0.02


class MadeUpEngine:
    """One token per live request and step. Follows WorkerEngine; steps run in a thread of their own, as an engine's."""

    def __init__(self) -> None:
        self.ticks = 0
        self.is_over = False
        self.period_s = IDLE_S  # of a step; written by whoever sets the rate
        self._inbox: queue.SimpleQueue[tuple[EngineRequest, OutputSink] | tuple[str, int]] = queue.SimpleQueue()
        self._live: dict[tuple[str, int], tuple[EngineRequest, OutputSink]] = {}
        self._num_made: dict[tuple[str, int], int] = {}
        self._scores = {token_at(i): _scores(token_at(i)) for i in range(2000)}

    def submit(self, request: EngineRequest, sink: OutputSink, front_end: str) -> None:
        """See WorkerEngine."""
        self._inbox.put((request, sink))

    def cancel(self, request_id: str, attempt: int, sink: OutputSink, *, enough: bool = False) -> None:
        """See WorkerEngine."""
        self._inbox.put((request_id, attempt))

    @property
    def load(self) -> Load:
        """See WorkerEngine."""
        return Load(running=len(self._live), free_pages=1000, total_pages=1000)

    def run(self) -> None:
        """Step for ever. A step that is late is not made up for."""
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self.period_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._look()
            self._step()
            self.ticks += 1

    def _look(self) -> None:
        while not self._inbox.empty():
            match self._inbox.get():
                case (EngineRequest() as request, sink):
                    key = request.request_id, request.attempt
                    self._live[key], self._num_made[key] = (request, sink), len(request.generated_token_ids)
                case (str(request_id), int(attempt)):
                    self._live.pop((request_id, attempt), None)
                    self._num_made.pop((request_id, attempt), None)

    def _step(self) -> None:
        by_sink: dict[int, tuple[OutputSink, list[Output]]] = {}
        for key, (request, sink) in list(self._live.items()):
            token_id = token_at(self._num_made[key])
            self._num_made[key] += 1
            output = Output(request_id=request.request_id, attempt=request.attempt, token_ids=(token_id,))
            if request.sampling.logprobs is not None:
                output.logprobs = self._scores[token_id]
            if self._num_made[key] >= request.sampling.max_tokens:
                output.finish = FinishReason.LENGTH
                del self._live[key], self._num_made[key]
            by_sink.setdefault(id(sink), (sink, []))[1].append(output)
        for sink, outputs in by_sink.values():
            sink(outputs)


def _scores(token_id: int) -> tuple[TokenLogprob, ...]:
    top = tuple((token_at(token_id + rank), -0.25 - rank) for rank in range(5))
    return (TokenLogprob(token_id, -0.123, top),)


def serve_worker(pipe: Connection, router: str) -> None:
    """The process's main: says its address; then each number is the period of a step in seconds."""
    engine = MadeUpEngine()
    threading.Thread(target=engine.run, daemon=True).start()

    async def serve() -> None:
        server = make_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerService(engine, TransferConfig(dead_after_s=DEAD_AFTER_S)), server
        )
        address = bind(server, HOST)
        await server.start()
        member = Member(
            role=Role.UNIFIED,
            address=address,
            worker=f"pid {os.getpid()} @ {address}",
            epoch=str(os.getpid()),
            card=ModelCard(name=MODEL, max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer().vocab_size, fingerprint="made up"),
        )
        _client = FleetClient(member, (router,), state=lambda: Report(engine.load))
        keep_what_is_there()
        pipe.send(address)
        while True:
            engine.period_s = await asyncio.to_thread(pipe.recv)
            pipe.send(True)

    uvloop.run(serve())
