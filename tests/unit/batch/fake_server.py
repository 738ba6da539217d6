"""A deterministic OpenAI-compatible server on a real socket: what it answers is computed from the prompt and the seed."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

HANGS_UP, SAYS_NOTHING = 0, -1  # in place of an HTTP status
SILENCE_S = 3.0
AWAY_S = 0.3
LIMIT_S = 120.0


class FakeServer(ThreadingHTTPServer):
    """Answers after `delay_s`. `refusals`: how many requests to answer with 503 first. `odd`: HTTP status and body by prompt
    (a GET: by path) in place of what it would say. `dies_of`: a prompt at which it hangs up on everybody, for `away_s`.
    `together`: nothing is answered before so many requests were there at once. `meanwhile`: what is called by prompt, before
    that is answered. `model` and `weights` are told of."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        refusals: int = 0,
        odd: Mapping[str, tuple[int, bytes]] | None = None,
        dies_of: str | None = None,
        away_s: float = AWAY_S,
        together: int = 0,
        meanwhile: Mapping[str, Callable[[], object]] | None = None,
        model: str = "fake",
        weights: str | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.delay_s = delay_s
        self.refusals = refusals
        self.odd = odd or {}
        self.dies_of = dies_of
        self.away_s = away_s
        self.together = together
        self.meanwhile = meanwhile or {}
        self.model = {"model": model} | ({} if weights is None else {"system_fingerprint": weights})
        self.card = {"id": model, "object": "model"} | ({} if weights is None else {"fingerprint": weights})
        self.were_together = threading.Event()
        self.ended = threading.Event()
        self.back_s = 0.0  # monotonic
        self.open: set[socket.socket] = set()
        self.asked: Counter[str] = Counter()  # prompts
        self.named: set[str | None] = set()  # X-Request-Id of each
        self.most_at_once = 0
        self.at_once = 0
        self.lock = threading.Lock()
        self.ids = count(1)

    def hang_up(self) -> None:
        """On everybody there is."""
        self.back_s = time.monotonic() + self.away_s
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever has gone, or was hung up on, cannot be written to: no word of that on stderr, which is a later test's."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer  # type: ignore[assignment]

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def _is_away(self) -> bool:
        if is_away := time.monotonic() < self.server.back_s:
            self._send(HANGS_UP, b"")
        return is_away

    def do_GET(self) -> None:
        if self._is_away():
            return
        if self.path in self.server.odd:
            self._send(*self.server.odd[self.path])
        else:
            self._answer(200, {"object": "list", "data": [self.server.card]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        if self._is_away():
            return
        if server.dies_of is not None and body.get("prompt") == server.dies_of:
            server.hang_up()
        with server.lock:
            server.asked[json.dumps(body.get("prompt", body.get("messages")))] += 1
            server.named.add(self.headers["x-request-id"])
            refused = server.refusals > 0
            server.refusals -= refused
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            if server.at_once >= server.together:
                server.were_together.set()
        prompt = body.get("prompt")
        if isinstance(prompt, str) and prompt in server.meanwhile:
            server.meanwhile[prompt]()
        server.were_together.wait(LIMIT_S)
        server.ended.wait(server.delay_s)
        if refused:
            status, answer = 503, {"error": {"message": "loading"}}
        elif body.get("max_tokens") == -1:
            status, answer = 400, {"error": {"message": "max_tokens: must be at least 1", "param": "max_tokens"}}
        else:
            status, answer = 200, self._completion(body)
        with server.lock:
            server.at_once -= 1
        if isinstance(prompt, str) and prompt in server.odd:
            self._send(*server.odd[prompt])
        else:
            self._answer(status, answer)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Id, time and cache hits differ at every call, as a real server's do."""
        number = next(self.server.ids)
        text = f"{body.get('prompt', body.get('messages'))} with seed {body['seed']} on {self.path} \N{SNOWMAN}"
        details = {"cached_tokens": number}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": details}
        return {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            **self.server.model,
            "created": int(time.time()),
            "choices": [{"index": 0, "text": text}],
            "usage": usage,
        }

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, raw: bytes) -> None:
        if status == SAYS_NOTHING:
            self.server.ended.wait(SILENCE_S)
        if status in (HANGS_UP, SAYS_NOTHING):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def serving(**options: Any) -> Iterator[FakeServer]:
    """A running server."""
    server = FakeServer(**options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.were_together.set()
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
