"""A prompt that waits for a decode worker's KV instead of its turn keeps its place in the queue of its prefill worker."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Overloaded
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.messages import HandoffId, Lending
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.sched.queue_limit import UNKNOWN_RETRY_S
from tests.unit.roles.network_fake import FakeFetcher, Network
from tests.unit.sched.engine_fake import FakeEngine, request

PROMPT = tuple(range(3, 15))


def borrowing_of(engine: FakeEngine) -> KVBorrowing:
    return KVBorrowing(
        Borrower(TransferConfig(), bytes_per_token=8), min_tokens=4, page_size=4, dtype="float32", scheduler=engine.scheduler,
        runner=cast("Any", None), fetcher=FakeFetcher(Network(), Inbox()), metrics=Metrics(),
    )  # fmt: skip


def borrow(engine: FakeEngine, name: str) -> None:
    engine.add(asked := request(name, PROMPT, 3))
    lending = Lending(address="d", backend="fake", dtype="float32")
    borrowing_of(engine).consider(act.Admit(HandoffId(name, 1), asked, len(PROMPT), lending), engine.now_s)


def test_no_place_came_free_when_one_that_waits_begins_to_borrow() -> None:
    engine = FakeEngine(Role.PREFILL, num_pages=5, max_num_seqs=1, max_num_batched_tokens=1, max_queue_len=2)
    engine.add(request("runs", PROMPT, 3))
    engine.tick()
    engine.add(request("waits", PROMPT, 3))
    engine.tick()
    borrow(engine, "borrows")
    assert (engine.scheduler.counts()["waiting"], engine.scheduler.counts()["prealloc"]) == (1, 1)
    engine.now_s += 0.1
    engine.scheduler.schedule(engine.now_s)  # there are no pages for its prompt yet
    with pytest.raises(Overloaded) as refused:
        engine.add(request("one too many", PROMPT, 3))
    assert refused.value.retry_after_s == UNKNOWN_RETRY_S, "nobody has left this queue yet"
