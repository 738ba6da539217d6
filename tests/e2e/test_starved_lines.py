"""A P that answers while its KV does not come: other P's are asked, then D computes itself, and nobody's tokens change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from chaos_kit.proxy import Proxy, Weather

from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import Start
from tests.e2e.processes import ServerProcess

GRPC = ("--kv-transfer-backend", "grpc", "--no-enable-prefix-caching")
LIMIT_S = 30.0
TRIES = 5  # where a P stands still for longer than half a second its prompt moves for that, and not for want of KV
T = TypeVar("T")


class Line:
    """The only way to a worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target_port: int) -> None:
        self._loop = loop
        self._proxy = Proxy(lambda proxy, connection: None)
        self._proxy.target_port = target_port
        self.address = f"127.0.0.1:{self._do(self._proxy.start()).port}"

    def starve(self) -> None:
        """From now on a connection on which KV comes brings nothing any more."""

        async def change() -> None:
            self._proxy.set_weather(Weather.STARVE)

        self._do(change())

    def close(self) -> None:
        """Cut it."""
        self._do(self._proxy.close())

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(LIMIT_S)


@contextmanager
def lines(*workers: ServerProcess) -> Iterator[list[Line]]:
    """One to each worker, on an event loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lines", daemon=True)
    thread.start()
    opened: list[Line] = []
    try:
        for worker in workers:
            opened.append(Line(loop, int(worker.grpc.rpartition(":")[2])))
        yield opened
    finally:
        for line in opened:
            line.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


def asked(name: str) -> Asked:
    prompt = tuple(16 + 7 * i % 900 for i in range(150))
    return Asked(prompt=prompt, request_id=name, sampling={"max_tokens": 20, "ignore_eos": True, "seed": 26})


def quiet(decode: ServerProcess, name: str = "") -> list[str]:
    """What D's log says of P's that it did not hear, which stood still then; of one request, if it is named."""
    of_it = f"request {name}/" if name else "request "
    return [line for line in decode.log_since_ready().splitlines() if of_it in line and "nothing heard for" in line]


@pytest.mark.covers("I-2")
def test_where_its_kv_does_not_come_from_another_p_is_asked_and_then_nobody(
    start: Start, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    flags = (*exact_flags, *GRPC)
    workers = [start(name, "--role", "prefill", *flags) for name in ("one", "two")]
    with lines(*(worker.wait_ready() for worker in workers)) as both:
        peers = ",".join(line.address for line in both)
        decode = start("decode", "--role", "decode", "--prefill", peers, *flags).wait_ready()
        wanted = run_all(unified.grpc, [asked("reference")])[0].essence()

        def serve(name: str) -> tuple[str, list[str]]:
            for number in range(TRIES):
                worker, rungs = serve_once(f"{name}-{number}")
                if not quiet(decode, f"{name}-{number}"):
                    break
            return worker, rungs

        def serve_once(name: str) -> tuple[str, list[str]]:
            (got,) = run_all(decode.grpc, [asked(name)])
            assert got.error is None
            assert got.complete is not None
            assert got.essence() == wanted
            provenance = got.complete.choices[0].provenance
            return provenance.prefill_worker, list(provenance.recoveries)

        spoilt, nothing = serve("before")
        assert nothing == []
        names = [f"pid {worker.pid} @ {worker.grpc}" for worker in workers]
        at = names.index(spoilt)
        both[at].starve()
        saviour, rungs = serve("first")
        assert saviour == names[1 - at]
        assert rungs[-1] == "other_prefill"
        assert [serve(f"later-{i}") for i in range(3)] == 3 * [(saviour, [])], "it is remembered who sends nothing"
        others = decode.metric("jdisagg_recoveries_total", rung="other_prefill")
        assert others - sum("other_prefill" in line for line in quiet(decode)) == 1
        both[1 - at].starve()
        _, rungs = serve("alone")
        assert "local_prefill" in rungs
    assert decode.metric("jdisagg_compiles_after_ready_total") == 0
