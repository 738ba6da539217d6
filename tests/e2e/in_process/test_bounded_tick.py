"""A tick of the engine thread waits for nothing but its device: it opens, connects to, sends to and sleeps for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.e2e.in_process.conftest import Runners
from tests.e2e.in_process.engines import Engine
from tests.e2e.in_process.loads import engine_requests, long_outputs
from tests.e2e.in_process.runners import MAX_LEN
from tests.unit.auditor import Auditor, self_check, the_auditor
from tests.unit.engine.support import VOCAB


@pytest.fixture
def auditor(monkeypatch: pytest.MonkeyPatch) -> Auditor:
    auditor = the_auditor()
    auditor.patch(monkeypatch)
    assert self_check(auditor) == ["Condition.wait", "open", "time.sleep"]
    return auditor


def watched(auditor: Auditor, tick: Callable[[float], bool]) -> Callable[[float], bool]:
    def watched_tick(now_s: float) -> bool:
        with auditor.watching():
            return tick(now_s)

    return watched_tick


@pytest.mark.covers("I-7")
@pytest.mark.parametrize("kind", ["unified", "pair"])
def test_no_tick_waits_for_anything_outside(
    exact: Runners, kind: str, auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = exact.make_pair(decode={"num_pages": 40, "caching": True}, prefill={"caching": True}, want_min_tokens=1)
    unified = Engine(exact.unified, num_pages=40, caching=True)
    front, engines = (unified, (unified,)) if kind == "unified" else (pair, (pair.prefill, pair.decode))
    requests = engine_requests(12, vocab_size=VOCAB, max_model_len=MAX_LEN, shared_prefix=True) + long_outputs(
        8, vocab_size=VOCAB
    )
    try:
        for engine in engines:
            monkeypatch.setattr(engine, "tick", watched(auditor, engine.tick))
        front.serve(requests[:4])  # what is imported late is imported now
        auditor.seen.clear()
        streams = front.serve(requests[4:])
    finally:
        pair.close()
    assert sum(len(stream.tokens) for stream in streams.values()) > 100
    assert not auditor.seen, auditor.seen
    counts = Counter[str]()
    for engine in engines:
        counts.update(engine.counters())
    assert counts["offloads"] + counts["preemptions"] + counts["retractions"] > 0, counts  # memory was short
