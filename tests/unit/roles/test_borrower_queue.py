"""A prompt that waits for a decode worker's KV instead of its turn keeps its place in the queue of its prefill worker."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Overloaded
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import STALL_S, Borrower
from jdisagg.handoff.messages import HandoffId, Lending
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.kv_borrowing import NO_KV_S, KVBorrowing
from jdisagg.sched.queue_limit import UNKNOWN_RETRY_S
from tests.unit.roles.network_fake import FakeFetcher, Network
from tests.unit.sched.engine_fake import FakeEngine, request

PROMPT = tuple(range(3, 15))


def borrowing_of(engine: FakeEngine) -> KVBorrowing:
    return KVBorrowing(
        Borrower(TransferConfig(), bytes_per_token=8), min_tokens=4, page_size=4, dtype="float32", scheduler=engine.scheduler,
        runner=cast("Any", None), fetcher=FakeFetcher(Network(), Inbox()), metrics=Metrics(),
    )  # fmt: skip


def borrow(engine: FakeEngine, name: str, borrowing: KVBorrowing, address: str = "d") -> None:
    engine.add(asked := request(name, PROMPT, 3))
    lending = Lending(address=address, backend="fake", dtype="float32")
    borrowing.consider(act.Admit(HandoffId(name, 1), asked, len(PROMPT), lending), engine.now_s)


def test_no_place_came_free_when_one_that_waits_begins_to_borrow() -> None:
    engine = FakeEngine(Role.PREFILL, num_pages=5, max_num_seqs=1, max_num_batched_tokens=1, max_queue_len=2)
    engine.add(request("runs", PROMPT, 3))
    engine.tick()
    engine.add(request("waits", PROMPT, 3))
    engine.tick()
    borrow(engine, "borrows", borrowing_of(engine))
    assert (engine.scheduler.counts()["waiting"], engine.scheduler.counts()["prealloc"]) == (1, 1)
    engine.now_s += 0.1
    engine.scheduler.schedule(engine.now_s)  # there are no pages for its prompt yet
    with pytest.raises(Overloaded) as refused:
        engine.add(request("one too many", PROMPT, 3))
    assert refused.value.retry_after_s == UNKNOWN_RETRY_S, "nobody has left this queue yet"


def test_each_of_two_decode_workers_of_which_nothing_came_is_tried_by_one_prompt() -> None:
    """That nothing comes from one, still, says nothing of the other."""
    engine = FakeEngine(Role.PREFILL, num_pages=90, max_num_seqs=9, max_num_batched_tokens=1, max_queue_len=90)
    borrowing = borrowing_of(engine)

    def ask(name: str, address: str) -> bool:
        borrow(engine, name, borrowing, address)
        return name in borrowing.snapshot()

    def stall() -> None:
        engine.scheduler.schedule(engine.now_s)
        borrowing.planned(engine.now_s)
        for _ in range(3):
            borrowing.tick(engine.now_s)
            engine.now_s += STALL_S / 2
        assert not borrowing.snapshot()

    assert (ask("a", "d1"), ask("b", "d2")) == (True, True)
    stall()
    assert (ask("c", "d1"), ask("d", "d2")) == (False, False)
    engine.now_s += NO_KV_S
    assert (ask("e", "d1"), ask("f", "d1")) == (True, False)
    stall()
    assert (ask("g", "d2"), ask("h", "d2")) == (True, False)
