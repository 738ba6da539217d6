"""What the supervisor makes of a router's answer to "are you ready?"."""

from __future__ import annotations

import socket
import threading

import pytest

from jdisagg.serve.local import _probe


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
