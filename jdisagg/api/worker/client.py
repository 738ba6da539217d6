"""The router's end of one worker's Run stream. Lives on one event loop.

A link is made for one worker process and ends once: `on_up` is called when the worker first answers, `on_down` exactly once
with the reason, unless `abandon` was called first. An engine that stands still while heartbeats arrive ends its process by
itself (`jdisagg.roles.watchdog`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic, monotonic_ns

import grpc
import grpc.aio

from jdisagg.api.channels import INSECURE, Credentials, fill_message, open_channel
from jdisagg.api.codec import decode_output, encode_request
from jdisagg.api.fleet.codec import decode_load
from jdisagg.api.in_order import InOrder
from jdisagg.api.pulse import Pulse
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.core.fleet import Load
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.core.told import told
from jdisagg.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

CLOSED = "closed"  # the worker ended the stream in good order; every other reason is a failure
SILENT = "no heartbeat for --dead-after-s"  # a dead machine, a frozen process, or a network or host that paused


_OVER = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # what is written on a stream that has ended raises


class WorkerLink:
    """Submits requests to one worker and delivers their outputs."""

    def __init__(
        self,
        address: str,
        *,
        epoch: str = "",
        config: TransferConfig,
        on_outputs: Callable[[list[Output]], None],
        on_up: Callable[[], None],
        on_down: Callable[[str], None],
        on_load: Callable[[Load, int], None],
        on_quiet: Callable[[bool], None],
        waits: Callable[[float], bool],
        credentials: Credentials = INSECURE,
        router: str = "",
    ) -> None:
        """Connects at once, in the background, to the process of that `epoch` ("" = whichever is there). Callbacks run on the
        loop and must not block; `on_load` comes before the outputs of the same message, with the number of requests that are
        cancelled and that the worker still counts. `router`: a name of this process, by which the worker knows a replay of its
        own request from somebody else's request of the same id. `on_quiet`, `waits`: see Pulse."""
        self.address = address
        self.answered = False
        self._on_outputs = on_outputs
        self._decoded = InOrder(decode_output, self._deliver)
        self._on_up = on_up
        self._on_down = on_down
        self._on_load = on_load
        self._pulse = Pulse(heartbeat_s=config.heartbeat_s, dead_after_s=config.dead_after_s, on_quiet=on_quiet, waits=waits)
        self._first = worker_pb2.RunRequest(router=router, opened=monotonic_ns(), epoch=epoch)
        self._live: dict[str, int] = {}  # request id -> attempt
        self._submits: deque[EngineRequest] = deque()  # long ones take time to encode, and thousands fit no message
        self._cancels: list[worker_pb2.Cancel] = []
        self._wake = asyncio.Event()
        self._wake.set()
        self._task = asyncio.create_task(self._run(credentials))

    def submit(self, request: EngineRequest) -> None:
        """Queue for the next messages up; outputs come through `on_outputs` until one has `finish`."""
        self._live[request.request_id] = request.attempt
        self._submits.append(request)
        self._wake.set()

    def cancel(self, request_id: str, attempt: int, *, enough: bool = False) -> None:
        """Tell the worker to forget it, and whether its client has all that it wanted; idempotent. Outputs that are on their
        way still arrive."""
        if self._live.get(request_id) == attempt:
            del self._live[request_id]
            self._submits = deque(request for request in self._submits if request.request_id != request_id)
            self._cancels.append(worker_pb2.Cancel(request_id=request_id, attempt=attempt, enough=enough))
            self._wake.set()

    def abandon(self) -> None:
        """From now on no callback is called."""
        self._on_up = self._on_down = self._on_outputs = self._on_load = _ignore

    async def close(self) -> None:
        """Abandon, then end the stream and the channel."""
        self.abandon()
        await cancel_and_wait(self._task)

    async def _run(self, credentials: Credentials) -> None:
        reason, channel = CLOSED, None
        try:
            channel = open_channel(self.address, credentials, reads_ahead=False)  # what waits at the worker becomes less
            reason = await self._converse(worker_pb2_grpc.WorkerServiceStub(channel).Run())
        except Exception as error:  # a bug of ours or of grpc: the worker is lost to us, and the log says how
            log.exception("stream of worker %s", self.address)
            reason = repr(error)
        finally:
            try:
                if channel is not None:
                    await channel.close()
            except Exception:  # likewise
                log.exception("closing a connection to worker %s failed", self.address)
            finally:  # else nobody would connect it again
                self._on_down(reason)

    async def _converse(self, call: grpc.aio.StreamStreamCall) -> str:
        read = asyncio.create_task(self._read(call))
        write = asyncio.create_task(self._write(call))
        beat = asyncio.create_task(self._pulse.run(self._wake.set))
        try:
            done, _ = await asyncio.wait({read, write, beat}, return_when=asyncio.FIRST_COMPLETED)
            if done == {write} and _ended_with_stream(write):  # its reading half knows why
                done, _ = await asyncio.wait({read, beat}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            self._decoded.close()
            await cancel_and_wait(read, write, beat)
        if read in done:
            error = read.exception()
            if error is None:
                return CLOSED
            if isinstance(error, grpc.aio.AioRpcError):
                return f"{error.code().name}: {told(error.details() or '')}"
            raise error
        if write in done and not _ended_with_stream(write):
            await write  # raises: a bug of ours
        if beat in done:
            await beat  # likewise
        return SILENT

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        async for message in call:
            self._pulse.heard()
            if not self.answered:
                self.answered = True
                self._on_up()
            if message.HasField("load"):
                self._on_load(decode_load(message.load), self._num_cancelled(message))
            self._decoded.put(list(message.outputs))

    def _num_cancelled(self, message: worker_pb2.RunResponse) -> int:
        """Requests of which the message brings something although we have cancelled them: the worker had not heard of it."""
        return len({(o.request_id, o.attempt) for o in message.outputs if self._live.get(o.request_id) != o.attempt})

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None and self._live.get(output.request_id) == output.attempt:
                del self._live[output.request_id]
        self._on_outputs(outputs)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        message, self._first = self._first, worker_pb2.RunRequest()  # what it grows by is not kept
        while True:
            await self._wake.wait()
            self._wake.clear()
            message.submits.extend(fill_message(self._submits, _encode_submit))
            if self._submits:
                self._wake.set()
            message.cancels.extend(self._cancels)
            self._cancels.clear()
            message.heartbeat.SetInParent()
            await call.write(message)
            message = worker_pb2.RunRequest()


def _encode_submit(request: EngineRequest) -> worker_pb2.Submit:
    return worker_pb2.Submit(request=encode_request(request, monotonic()))


def _ended_with_stream(write: asyncio.Task[None]) -> bool:
    return write.cancelled() or isinstance(write.exception(), _OVER)


def _ignore(*_: object) -> None:
    """Nobody asks any more."""
