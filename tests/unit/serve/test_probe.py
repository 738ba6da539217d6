"""What the supervisor makes of a router's answer to "are you ready?"."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from jdisagg.core.settings import load_config
from jdisagg.serve import local
from jdisagg.serve.local import FLEET_READY_S, _probe
from jdisagg.serve.ready import Ready
from jdisagg.serve.supervisor import StartFailed, Supervisor


def probed(answer: bytes) -> tuple[bool, str]:
    """Of a server that says this and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)  # for a probe that goes elsewhere

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return _probe(f"http://127.0.0.1:{listener.getsockname()[1]}/ready")
        finally:
            thread.join()


def test_a_router_is_ready_when_it_says_so() -> None:
    assert probed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") == (True, "")
    assert probed(b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nwhy?") == (False, "503 why?")


def test_no_proxy_of_the_environment_stands_between_a_supervisor_and_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert probed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") == (True, "")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "RemoteDisconnected"),
        (b"HTTP/1.1", "BadStatusLine"),
        (b"no status line\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n9\r\nwhy", "IncompleteRead"),
    ],
)
def test_an_answer_that_breaks_off_is_a_reason_to_ask_again(answer: bytes, why: str) -> None:
    serves, said = probed(answer)
    assert not serves
    assert why in said


class Started:
    """A Supervisor whose children are READY at once."""

    async def start(self, specs: Sequence[object]) -> list[Ready]:
        return [Ready(role="fake", http="127.0.0.1:1", grpc="127.0.0.1:2", model="m") for _ in specs]


@pytest.mark.parametrize(("answers", "is_up"), [([False, True], True), ([False, False, True], False)])
def test_a_supervisor_that_stood_still_asks_once_more_before_it_gives_the_fleet_up(
    answers: list[bool], is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z reaches it alone: its children go on, and are ready when it does."""
    clock, rest = [0.0], iter(answers)

    def probe(url: str) -> tuple[bool, str]:
        return next(rest), "starting"

    async def standstill(seconds: float) -> None:
        clock[0] += FLEET_READY_S + seconds

    monkeypatch.setattr(local, "_probe", probe)
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(local, "asyncio", SimpleNamespace(to_thread=asyncio.to_thread, sleep=standstill))
    start = local._start_fleet(load_config(["--role", "local"], {}), cast(Supervisor, Started()), ("program",))
    if is_up:
        asyncio.run(start)
    else:
        with pytest.raises(StartFailed, match="not ready after 60 s: starting"):
            asyncio.run(start)
