"""The producing process: a PeerService whose engine publishes as many pieces as an Open asks for, a window ahead of Acks."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from time import process_time
from typing import Any

import grpc.aio
import jax

from jdisagg.api.channels import bind, make_server
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.handoff.events import PeerMessage, PeerOpened
from jdisagg.handoff.messages import Ack, StreamEnded
from jdisagg.serve.environment import keep_freed_memory
from jdisagg.transfer.base import Piece, Published, Publisher, PublishFailed
from transfer_bench.parts import HOST, PATIENT, Form, device_piece, identity, make_publisher

GATHER_S = 60.0
CPU = "cpu"  # the question for CPU seconds


class Engine:
    """Answers one stream at a time. `Open.held_tokens` is the number of pieces."""

    def __init__(
        self, form: Form, gathered: queue.SimpleQueue[jax.Array], publisher: Publisher, inbox: queue.SimpleQueue[Any]
    ) -> None:
        self._form = form
        self._gathered = gathered
        self._publisher = publisher
        self._inbox = inbox
        self._opened: PeerOpened | None = None
        self._keys: Iterator[int] = iter(())

    def run(self) -> None:
        """For ever."""
        while True:
            match self._inbox.get():
                case PeerOpened() as opened:
                    self._opened, self._keys = opened, iter(range(opened.message.held_tokens))
                    for _ in range(self._form.window):
                        self._publish()
                case Published(ready=ready) if self._opened is not None:
                    self._opened.reply.send(ready)
                case PublishFailed(reason=reason):
                    raise RuntimeError(f"publishing failed: {reason}")
                case PeerMessage(handoff=handoff, message=Ack(key=key)):
                    self._publisher.discard(key)
                    if self._opened is not None and self._opened.handoff == handoff:
                        self._publish()
                case PeerMessage(handoff=handoff, message=StreamEnded()) if self._opened is not None:
                    if self._opened.handoff == handoff:
                        self._opened = None

    def _publish(self) -> None:
        assert self._opened is not None
        if (number := next(self._keys, None)) is not None:
            piece = Piece(begin=0, end=self._form.tokens, data=self._gathered.get(timeout=GATHER_S))
            self._publisher.publish(self._opened.handoff, f"{self._opened.handoff.serial}-{number}", piece)


def produce(pipe: Connection, form: Form) -> None:
    """The process's main: says its address; then a number has it make so many pieces, each in memory of its own as a gather
    does it; CPU seconds are the answer to that and to CPU."""
    keep_freed_memory(os.environ)  # as a worker does
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    publisher, store = make_publisher(form, inbox.put)
    gathered: queue.SimpleQueue[jax.Array] = queue.SimpleQueue()
    original = device_piece(form.tokens)
    engine = threading.Thread(target=Engine(form, gathered, publisher, inbox).run, daemon=True)
    engine.start()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def serve() -> tuple[grpc.aio.Server, str]:
        server = make_server()
        service = PeerServer(identity("P", form.backend), post=inbox.put, pieces=store, config=PATIENT)
        add_peer_service(service, server)
        address = bind(server, HOST)
        await server.start()
        return server, address

    _server, address = asyncio.run_coroutine_threadsafe(serve(), loop).result(20)  # a server that nobody holds ends
    pipe.send(address)
    while True:
        if (asked := pipe.recv()) != CPU:
            for _ in range(asked):
                gathered.put(jax.block_until_ready(original.copy()))
        pipe.send(process_time())
