"""What becomes of a Hub that fails, by the library that asks it, which reads `HF_ENDPOINT` when it is imported."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

LIMIT_S = 150.0
SIZES = {"config.json": 2, "tokenizer.json": 2, "model.safetensors": 1_000_000}
ASKS = """
import json, sys, time
time.sleep = lambda seconds: None  # the library asks again, and waits in between
from jdisagg.core.errors import ConfigError
from jdisagg.models.resolve import read_model_config, resolve_model
for name in sys.argv[1:]:
    for ask in (resolve_model, read_model_config):
        try:
            told = [0, str(ask(name))]
        except ConfigError as error:
            told = [error.exit_status, error.message]
        print(json.dumps([name, *told]))
"""


class Hub(BaseHTTPRequestHandler):
    """A repository's name says what it answers: "cut" breaks off in the midst of weights, others are a status."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_CONNECT(self) -> None:
        self._send(403, {}, b"")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        owner, _, rest = path.removeprefix("/api/models/").lstrip("/").partition("/")
        name = rest.partition("/")[0]
        assert owner == "someone"
        if name != "cut":
            headers = {"X-Error-Code": {"404": "RepoNotFound", "403": "GatedRepo"}.get(name, "")}
            return self._send(int(name), headers, b"")
        if not path.startswith("/api/"):
            return self._send_file(path.rpartition("/")[2])
        if "/tree/" in path:
            told = [{"type": "file", "path": file, "size": size, "oid": "1" * 40} for file, size in SIZES.items()]
        else:
            siblings = [{"rfilename": file} for file in SIZES]
            told = {"_id": "1", "id": "someone/cut", "sha": "0" * 40, "private": False, "siblings": siblings}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def _send_file(self, file: str) -> None:
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{file.encode().hex()}"', "Content-Length": str(SIZES[file])}
        self._send(200, headers, b"{}")
        if self.command == "GET" and SIZES[file] > 2:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            self.connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def asked(url: str, directory: Path, *names: str, **more: str) -> list[tuple[str, int, str]]:
    """What is told of each, of the whole model and of its configuration alone: name, exit status, message."""
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(directory), "HF_HUB_OFFLINE": "0", "no_proxy": "*", **more}
    command = [sys.executable, "-c", ASKS, *names]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_model_whose_weights_break_off_is_fetched_by_the_next_start(hub: str, tmp_path: Path) -> None:
    (whole, config) = asked(hub, tmp_path, "someone/cut")
    assert whole[1] == 1
    assert "could not be fetched ([Errno 104] Connection reset by peer)" in whole[2]
    assert config == ("someone/cut", 0, "{}")


def test_a_hub_that_is_down_or_busy_may_have_the_model_later(hub: str, tmp_path: Path) -> None:
    told = asked(hub, tmp_path, "someone/500", "someone/429")
    assert [status for _, status, _ in told] == [1] * 4, told


def test_a_hub_that_cannot_be_reached_may_have_the_model_later(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        told = asked(f"http://127.0.0.1:{nobody.getsockname()[1]}", tmp_path, "someone/any")
    assert [status for _, status, _ in told] == [1] * 2, told


def test_a_proxy_that_refuses_may_let_the_next_one_through(tmp_path: Path, hub: str) -> None:
    told = asked("https://hub.invalid", tmp_path, "someone/any", no_proxy="", https_proxy=hub)
    assert [status for _, status, _ in told] == [1] * 2, told
    assert "403" in told[0][2]


def test_a_model_that_a_hub_does_not_have_or_does_not_give_is_a_bad_configuration(hub: str, tmp_path: Path) -> None:
    told = asked(hub, tmp_path, "someone/404", "someone/403", "someone/401", "no name!")
    assert [status for _, status, _ in told] == [2] * 8, told


def test_a_model_that_is_not_there_where_nobody_is_to_be_asked_is_a_bad_configuration(hub: str, tmp_path: Path) -> None:
    told = asked(hub, tmp_path, "someone/cut", HF_HUB_OFFLINE="1")
    assert [status for _, status, _ in told] == [2] * 2, told
