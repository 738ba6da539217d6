"""A P that answers while its KV does not come: other P's are asked, then D computes itself, and nobody's tokens change."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from chaos_kit.proxy import Proxy, Weather

from jdisagg.core.fleet import SUSPECT_S
from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import Start
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tries import fair

GRPC = ("--kv-transfer-backend", "grpc", "--no-enable-prefix-caching", "--dead-after-s", "4")  # who stands still lives
LIMIT_S = 30.0
TRIES = 5
STANDS_STILL = "a P that stands still is asked last for a while, or not at all"
SENDS_NOTHING = "answers, and its KV does not come"
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


def is_known(decode: ServerProcess) -> bool:
    """Whether D has noted that no KV came, as it does with the recovery or a moment later."""
    with suppress(AssertionError):
        wait_until(lambda: SENDS_NOTHING in decode.log_since_ready(), 2, SENDS_NOTHING)
    return SENDS_NOTHING in decode.log_since_ready()


def test_where_its_kv_does_not_come_from_another_p_is_asked_and_then_nobody(
    start: Start, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    flags = (*exact_flags, *GRPC)
    workers = [start(name, "--role", "prefill", *flags).wait_ready() for name in ("one", "two")]

    def holds(_: int) -> bool:
        """For a new D; False when the other P stood still just then, and D computed the prompt itself."""
        with lines(*workers) as both:
            peers = ",".join(line.address for line in both)
            decode = start("decode", "--role", "decode", "--prefill", peers, *flags).wait_ready()
            wanted = run_all(unified.grpc, [asked("reference")])[0].essence()

            def serve(name: str) -> tuple[str, list[str]]:
                (got,) = run_all(decode.grpc, [asked(name)])
                assert got.error is None
                assert got.complete is not None
                assert got.essence() == wanted
                provenance = got.complete.choices[0].provenance
                return provenance.prefill_worker, list(provenance.recoveries)

            def serve_until(name: str, is_it: Callable[[tuple[str, list[str]]], bool]) -> tuple[tuple[str, list[str]], int]:
                """What is wanted, and how often it was asked for: once, unless somebody stands still. A prompt moves for that,
                too, and who stood still is asked last for a while."""

                def served(number: int) -> tuple[tuple[str, list[str]], int]:
                    if number > 1:
                        time.sleep(SUSPECT_S / 2)
                    return serve(f"{name}-{number}"), number

                found, number = fair(served, lambda got: not is_it(got[0]), STANDS_STILL, tries=TRIES)
                assert is_it(found), f"{name}: {TRIES} times something else, at last {found}"
                return found, number

            (spoilt, _), _ = serve_until("before", lambda found: found[1] == [])
            names = [f"pid {worker.pid} @ {worker.grpc}" for worker in workers]
            at = names.index(spoilt)
            both[at].starve()
            (saviour, rungs), num_first = serve_until("first", lambda found: bool(found[1]) and is_known(decode))
            if rungs[-1] == "local_prefill":
                decode.stop()  # its processor is for the next one
                return False
            assert saviour == names[1 - at]
            assert rungs[-1] == "other_prefill"
            clean = [serve_until(f"later-{i}", lambda found: found == (saviour, [])) for i in range(3)]
            is_undisturbed = num_first == 1 and all(num_asked == 1 for _, num_asked in clean)
            others = decode.metric("jdisagg_recoveries_total", rung="other_prefill")
            assert others == 1 or not is_undisturbed, "it is remembered who sends nothing"
            both[1 - at].starve()
            _, rungs = serve("alone")
            assert "local_prefill" in rungs
        assert decode.metric("jdisagg_compiles_after_ready_total") == 0
        return True

    assert fair(holds, lambda held: not held, STANDS_STILL, tries=TRIES)
