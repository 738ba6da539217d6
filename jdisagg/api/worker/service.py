"""WorkerService of a decode or unified worker: one Run stream per router, one message up per engine tick.

    router                                worker
    RunRequest(submits, cancels)    ->    engine.submit / engine.cancel, in order
                                    <-    RunResponse(outputs, load): everything of the ticks since the last one
    Heartbeat                      <->    every heartbeat_s; the worker's carries the engine's tick counter, which is not read

When an engine raises, the stream breaks without a word of what it was told last: to routers that is a worker that died, of
which a request may be the cause, and not one that gives its requests back.

When the stream ends, by any cause, every request that came on it and is not finished is cancelled. A router that says nothing
is waited for: nobody else can go on with its requests, and where it or its network only paused nothing is lost. One that opens
another stream has given up the first. One that means another process, since that advertises an address which leads here, is
told so, and opens nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Protocol

import grpc.aio

from jdisagg.api.codec import decode_request, encode_output
from jdisagg.api.fleet.codec import encode_load
from jdisagg.api.in_order import InOrder
from jdisagg.api.pulse import Pulse
from jdisagg.api.status_details import end_call
from jdisagg.api.tasks import call_on, cancel_and_wait, first_message
from jdisagg.api.worker.output_backlog import OutputBacklog
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import RequestError
from jdisagg.core.fleet import Load
from jdisagg.core.latest import remember
from jdisagg.core.requests import EngineRequest, FinishReason, Output
from jdisagg.roles.ports import OutputSink
from jdisagg.text.grammar import Compiled, Grammars
from jdisagg.v1 import common_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_LOOK_S = 0.02
MOST_PROMPTS = 4  # of several choices, that are known while those choices come
_NO_HEARTBEAT = "router %s: no heartbeat for %.2f s; its requests are cancelled"


class WorkerEngine(Protocol):
    """The engine below the service. Calls never block and keep their order."""

    def submit(self, request: EngineRequest, sink: OutputSink, front_end: str) -> None:
        """Run it; `sink` is called from the engine thread, once per tick, also with the error if it is not admitted. An older
        attempt of the same `front_end` ends, one of another stays, and this one is refused."""
        ...

    def cancel(self, request_id: str, attempt: int, sink: OutputSink, *, enough: bool = False) -> None:
        """Forget what was submitted with `sink`; unknown ids and other attempts are ignored. No output follows. `enough`: its
        client has all that it wanted."""
        ...

    @property
    def load(self) -> Load:
        """How busy it is."""
        ...

    @property
    def ticks(self) -> int:
        """Finished ticks."""
        ...

    @property
    def is_over(self) -> bool:
        """It has raised: its process is about to end, and no request goes on."""
        ...


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Add it to a grpc.aio server with `add_WorkerServiceServicer_to_server`."""

    def __init__(
        self,
        engine: WorkerEngine,
        config: TransferConfig,
        grammars: Grammars | None = None,
        *,
        worker: str = "",
        epoch: str = "",
    ) -> None:
        """`grammars`: the engine's. `worker` and `epoch` are as routers know this process; "" = it takes whatever comes."""
        self._engine = engine
        self._worker = worker
        self._epoch = epoch
        self._grammars = grammars
        self._config = config
        self._runs: dict[str, _RunStream] = {}  # by router, the newest
        self._streams: set[_RunStream] = set()  # of routers that are connected

    @property
    def num_streams(self) -> int:
        """Routers that are connected; one that opens anew may count twice for a moment."""
        return len(self._streams)

    async def until_taken(self, deadline_s: float) -> None:
        """Once the engine has ended: wait until routers have taken what it said."""
        while (num_behind := sum(run.is_behind for run in self._streams)) and monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)
        if num_behind:
            log.warning("routers that have not taken all outputs by the end of --drain-s: %d", num_behind)

    async def Run(self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: grpc.aio.ServicerContext) -> None:
        """Serve one router until it goes away."""
        silence_s = max(self._config.lease_s, self._config.dead_after_s)
        try:
            first = await first_message(request_iterator, worker_pb2.RunRequest(), silence_s)
        except grpc.aio.BaseError:  # the server stops
            return None
        if first is None:
            return log.warning(_NO_HEARTBEAT, context.peer(), silence_s)
        if first.epoch and self._epoch and first.epoch != self._epoch:
            told = f"this is {self._worker}, and another process is meant"
            return end_call(context, grpc.StatusCode.FAILED_PRECONDITION, told)
        run = _RunStream(self._engine, self._grammars, router=first.router, opened=first.opened)
        if not self._takes_over(run):
            return None
        pulse = Pulse(heartbeat_s=self._config.heartbeat_s, dead_after_s=silence_s)
        read = asyncio.create_task(run.read(first, request_iterator, pulse))
        write = asyncio.create_task(run.write(context))
        beat = asyncio.create_task(pulse.run(run.beat))
        self._streams.add(run)
        try:
            done, _ = await asyncio.wait({read, write, beat, run.superseded}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(run)
            if self._runs.get(run.router) is run:
                del self._runs[run.router]
            run.end()
            await cancel_and_wait(read, write, beat)
        if self._engine.is_over:
            end_call(context, grpc.StatusCode.UNAVAILABLE, "its engine has stopped; see its log")
        for task in done & {read, write, beat}:
            error = task.exception()
            if error is not None and not isinstance(error, grpc.aio.BaseError):
                raise error  # a bug of ours: gRPC logs it, and the router hears of no end in good order
        if done == {beat}:
            log.warning(_NO_HEARTBEAT, context.peer(), silence_s)
        return None

    def _takes_over(self, run: _RunStream) -> bool:
        """The router of `run` has opened it, and so given up those before. False: it is one of these, and heard late."""
        other = self._runs.get(run.router)
        if other is not None and 0 < run.opened < other.opened:
            return False
        if other is not None and not other.superseded.done():
            other.superseded.set_result(None)
        if run.router:
            self._runs[run.router] = run
        return True


class _RunStream:
    """One router's requests. On the loop, where `_sink` has the engine's outputs delivered."""

    def __init__(self, engine: WorkerEngine, grammars: Grammars | None, *, router: str, opened: int) -> None:
        self.router = router
        self.opened = opened  # as the router counts its streams
        loop = asyncio.get_running_loop()
        self.superseded: asyncio.Future[None] = loop.create_future()
        self._engine = engine
        self._grammars = grammars
        # by request id and attempt; its grammar is held, or being compiled, and the engine does not know the request yet
        self._live: dict[tuple[str, int], Compiled | asyncio.Task[None] | None] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}  # of the latest choices to have come, by fork group
        self._outputs = OutputBacklog()
        self._encoded = InOrder(encode_output, self._append)
        self._is_writing = False  # outputs
        self._heartbeat_due = True
        self._wake = asyncio.Event()
        self._wake.set()  # an answer at once: the router learns that we are there
        self._sink = partial(call_on, loop, self._deliver)  # one object: the engine groups a tick's outputs by sink

    async def read(self, first: worker_pb2.RunRequest, requests: AsyncIterator[worker_pb2.RunRequest], pulse: Pulse) -> None:
        """Hand submits and cancels to the engine, those of the `first` message and of all after it."""
        self._take(first)
        async for message in requests:
            pulse.heard()
            self._take(message)

    def _take(self, message: worker_pb2.RunRequest) -> None:
        for cancel in message.cancels:
            self._forget((cancel.request_id, cancel.attempt))
            self._engine.cancel(cancel.request_id, cancel.attempt, self._sink, enough=cancel.enough)
        for submit in message.submits:
            self._submit(submit.request)

    async def write(self, context: grpc.aio.ServicerContext) -> None:
        """One message per wake-up with everything there is, or several; while one waits to be taken, the next gathers. Ends
        with the engine; raises once outputs were lost on their way here."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._engine.is_over:
                return
            self._encoded.check()
            outputs = self._outputs.fill()
            if self._outputs:
                self._wake.set()
            heartbeat, self._heartbeat_due = self._heartbeat_due, False
            message = worker_pb2.RunResponse(outputs=outputs, load=encode_load(self._engine.load))
            if heartbeat:
                message.heartbeat.ticks = self._engine.ticks
            self._is_writing = bool(outputs)
            await context.write(message)
            self._is_writing = False

    @property
    def is_behind(self) -> bool:
        """There are outputs that the router has not taken."""
        return self._is_writing or bool(self._outputs) or self._encoded.has_waiting

    def beat(self) -> None:
        """Send a message, a heartbeat."""
        self._heartbeat_due = True
        self._wake.set()

    def end(self) -> None:
        """Cancel everything unfinished; idempotent."""
        for request_id, attempt in tuple(self._live):
            self._forget((request_id, attempt))
            self._engine.cancel(request_id, attempt, self._sink)
        self._encoded.close()

    def _submit(self, message: common_pb2.EngineRequest) -> None:
        try:
            request = self._with_shared_prompt(decode_request(message, monotonic()))
            self._live[request.request_id, request.attempt] = None
            self._hand_on(request)
        except RequestError as error:
            self._fail((message.request_id, message.attempt), error)

    def _with_shared_prompt(self, request: EngineRequest) -> EngineRequest:
        """The choices of one prompt come one behind the other, each with a copy of it: one is kept."""
        if not request.fork_group:
            return request
        if (known := self._prompts.get(request.fork_group)) == request.prompt_token_ids:
            request = replace(request, prompt_token_ids=known)
        remember(self._prompts, request.fork_group, request.prompt_token_ids, MOST_PROMPTS)
        return request

    def _hand_on(self, request: EngineRequest) -> None:
        """To the engine, which is not to wait until its grammar is compiled."""
        grammar, grammars = request.sampling.grammar, self._grammars
        if grammar is None or grammars is None:
            self._engine.submit(request, self._sink, self.router)
            return

        async def compile_first() -> None:
            try:
                self._live[key] = await grammars.ahead(grammar)
            except RequestError as error:
                self._fail(key, error)
            except Exception:  # a bug of ours: else its client would wait for nothing until its deadline
                log.exception("request %s: its grammar could not be compiled", request.request_id)
                self._fail(key, RequestError("internal error; the worker's log has the details"))
            else:
                self._engine.submit(request, self._sink, self.router)

        key = request.request_id, request.attempt
        self._live[key] = asyncio.create_task(compile_first())

    def _fail(self, key: tuple[str, int], error: RequestError) -> None:
        request_id, attempt = key
        self._deliver([Output(request_id=request_id, attempt=attempt, finish=FinishReason.ERROR, error=error)])

    def _forget(self, key: tuple[str, int]) -> None:
        if isinstance(held := self._live.pop(key, None), asyncio.Task):
            held.cancel()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._live.pop((output.request_id, output.attempt), None)
        self._encoded.put(outputs)

    def _append(self, outputs: list[common_pb2.Output]) -> None:
        self._outputs.put(outputs)
        self._wake.set()
