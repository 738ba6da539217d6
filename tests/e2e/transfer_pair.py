"""Two `transfer_peer` processes and a bounded conversation with each."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.e2e.processes import wait_until
from tests.e2e.transfer_peer import digest, values
from tests.e2e.tries import fair

CHUNK, FEATURES = 64, 16
NOT_GREETED = "before receiving SETTINGS"  # gRPC's words
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed leaves RSS at once


class Peer:
    """One process; whatever does not answer in time is killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.transfer_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **ALLOCATOR},
            process_group=0,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._text = b""
        self.pid = int(self._read(150.0)["pid"])

    def ask(self, do: str, *, answer_s: float = 90.0, **order: Any) -> dict[str, Any]:
        """Its answer."""
        self.tell(do, **order)
        return self._read(answer_s)

    def tell(self, do: str, **order: Any) -> None:
        """Send an order without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        self.process.stdin.flush()

    def _read(self, within_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._text:
                if time.monotonic() > deadline_s or self.process.poll() is not None:
                    status = self.process.poll()
                    self.kill()
                    raise AssertionError(f"no answer within {within_s} s; exit status {status}")
                if selector.select(timeout=0.2):
                    self._text += self.process.stdout.read() or b""
        line, self._text = self._text.split(b"\n", 1)
        return json.loads(line)

    def signal(self, number: int) -> None:
        """SIGSTOP returns when the process has stopped."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{self.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 5, "the process has stopped")

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        self.process.kill()  # not by pid: after it was waited for, its number may be another process's
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class TransferPair:
    """A producer and a consumer of one backend; each may be replaced."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.producer, self.consumer = Peer(), Peer()
        self.peer = ""
        self._form: dict[str, Any] = {}

    def start(
        self, *, tp_p: int = 1, tp_d: int = 1, dtype: str = "float32", d_dtype: str = "", chunk: int = CHUNK,
        d_chunk: int = 0, features: int = FEATURES, checksums: bool = True,
    ) -> TransferPair:  # fmt: skip
        """Give both a new half."""
        common = {"backend": self.backend, "features": features}
        self._form = {"features": features, "dtype": dtype, "tp_d": tp_d}
        self.produce = common | {"tp": tp_p, "dtype": dtype, "chunk": chunk, "checksums": checksums}
        self._consume = common | {"tp": tp_d, "dtype": d_dtype or dtype, "chunk": d_chunk or chunk}
        self.peer = self.producer.ask("produce", **self.produce)["peer"]
        self.consumer.ask("consume", **self._consume)
        return self

    def replace_producer(self) -> None:
        self.producer.kill()
        self.producer = Peer()
        self.peer = self.producer.ask("produce", **self.produce)["peer"]

    def replace_consumer(self) -> None:
        self.consumer.kill()
        self.consumer = self.another_consumer()

    def another_consumer(self) -> Peer:
        consumer = Peer()
        consumer.ask("consume", **self._consume)
        return consumer

    def published(self, key: str, seed: int = 0, tokens: int = CHUNK, *, receiver: str = "") -> dict[str, Any]:
        form = {"seed": seed, "tokens": tokens, "head_shards": self._form["tp_d"]}
        answer = self.producer.ask("publish", key=key, receiver=receiver, **form)
        assert "ready" in answer, answer
        return answer["ready"]

    def fetched(self, ready: dict[str, Any], *, within_s: float = 25.0, consumer: Peer | None = None) -> dict[str, Any]:
        consumer = consumer or self.consumer

        def fetch(_: int) -> dict[str, Any]:
            consumer.ask("fetch", ready=ready, peer=self.peer, within_s=within_s)
            return consumer.ask("event", timeout_s=within_s + 10)

        no_core = "the process had no core for the second that it is given"
        return fair(fetch, lambda got: NOT_GREETED in got.get("detail", ""), no_core, tries=8)

    def digest(self, seed: int, tokens: int = CHUNK, dtype: str = "") -> str:
        array = values(seed, tokens, self._form["features"], self._form["dtype"])
        return digest(array.astype(dtype) if dtype else array)

    def moves(self) -> None:
        """A piece goes through."""
        key, seed = f"alive-{time.monotonic()}", 7
        got = self.fetched(self.published(key, seed))
        assert got.get("digest") == self.digest(seed), got
        self.producer.ask("discard", keys=[key])

    def close(self) -> None:
        self.producer.kill()
        self.consumer.kill()


def wait_no_more(peer: Peer, **most: int) -> None:
    """Until the process holds no more than this: what has just been closed takes a moment to be gone."""
    wait_until(lambda: all(peer.ask("look")[name] <= most[name] for name in most), 30, str(most), lambda: peer.ask("look"))
