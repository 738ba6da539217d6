"""A tick of the engine thread waits for nothing but its device: it opens, connects to, sends to and sleeps for nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.e2e.in_process.conftest import Runners
from tests.e2e.in_process.engines import Engine
from tests.e2e.in_process.loads import engine_requests, long_outputs
from tests.e2e.in_process.runners import MAX_LEN
from tests.unit.engine.support import VOCAB

OUTSIDE = ("open", "socket.", "subprocess.", "os.", "shutil.", "fcntl.", "signal.pthread_kill", "import")
SLEEP_S = 0.0002  # asked for; less is a yield


class Auditor:
    """Notes what the thread that ticks asks of the world outside the process, for as long as it is in a tick."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._ticking: int | None = None
        self._sleep = time.sleep

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Python's audit hook, which stays for the life of the process."""
        if self._ticking == threading.get_ident() and event.startswith(OUTSIDE):
            self.seen[f"{event} {arguments[:1]}"] += 1

    def sleep(self, seconds: float) -> None:
        """In place of time.sleep."""
        if self._ticking == threading.get_ident() and seconds > SLEEP_S:
            self.seen[f"sleep {seconds}"] += 1
        self._sleep(seconds)

    def watch(self, tick: Callable[[float], bool]) -> Callable[[float], bool]:
        """The same tick, watched."""

        def watched(now_s: float) -> bool:
            self._ticking = threading.get_ident()
            try:
                return tick(now_s)
            finally:
                self._ticking = None

        return watched


@pytest.fixture(scope="module")
def hooked() -> Auditor:
    auditor = Auditor()
    sys.addaudithook(auditor.audit)
    return auditor


def test_the_auditor_sees_what_a_tick_must_not_do(hooked: Auditor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", hooked.sleep)

    def guilty(now_s: float) -> bool:
        with open(__file__, "rb"):
            time.sleep(0.001)
        return now_s > 0

    hooked.seen.clear()
    hooked.watch(guilty)(1.0)
    assert sorted(name.split()[0] for name in hooked.seen) == ["open", "sleep"]


@pytest.mark.covers("I-7")
@pytest.mark.parametrize("kind", ["unified", "pair"])
def test_no_tick_waits_for_anything_outside(
    exact: Runners, kind: str, hooked: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = exact.make_pair(decode={"num_pages": 40, "caching": True}, prefill={"caching": True}, want_min_tokens=1)
    unified = Engine(exact.unified, num_pages=40, caching=True)
    front, engines = (unified, (unified,)) if kind == "unified" else (pair, (pair.prefill, pair.decode))
    requests = engine_requests(12, vocab_size=VOCAB, max_model_len=MAX_LEN, shared_prefix=True) + long_outputs(
        8, vocab_size=VOCAB
    )
    try:
        monkeypatch.setattr(time, "sleep", hooked.sleep)
        for engine in engines:
            monkeypatch.setattr(engine, "tick", hooked.watch(engine.tick))
        front.serve(requests[:4])  # what is imported late is imported now
        hooked.seen.clear()
        streams = front.serve(requests[4:])
    finally:
        pair.close()
    assert sum(len(stream.tokens) for stream in streams.values()) > 100
    assert not hooked.seen, hooked.seen
    counts = Counter[str]()
    for engine in engines:
        counts.update(engine.counters())
    assert counts["offloads"] + counts["preemptions"] + counts["retractions"] > 0, counts  # memory was short
