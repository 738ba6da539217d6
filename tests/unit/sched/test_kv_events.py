"""Somebody who sees nothing but the events knows what the prefix index holds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jdisagg.core.errors import InvalidRequest, Overloaded
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Output, Role
from jdisagg.kv.events import Batch, Cleared, KVEvent, PrefixJournal, Removed, Stored, digest
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.sched.table import Reserved
from tests.unit.sched.engine_fake import FakeEngine, next_token, request

NUM_OPERATIONS = 10_000
NUM_CHECKS = 50
PAGE_SIZE = 4


class Listener:
    """Keeps the set by the meaning of the events alone."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.seen: list[KVEvent] = []
        self.sequence = 0

    def take(self, batch: Batch) -> None:
        assert batch.sequence == self.sequence + 1, "a gap"
        assert batch.events, "an empty batch"
        self.sequence = batch.sequence
        for event in batch.events:
            self.seen.append(event)
            if isinstance(event, Stored):
                parents = (event.parent, *event.keys)
                for i, key in enumerate(event.keys):
                    assert key not in self.pages, "stored twice"
                    self.pages[key] = (parents[i], event.token_ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE])
            elif isinstance(event, Removed):
                for key in event.keys:
                    del self.pages[key]
            else:
                self.pages = {}


class Worker:
    """A fake engine with a feed and a listener, and the peers of a decode worker."""

    def __init__(self, role: Role, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = FakeEngine(role, num_pages=24, page_size=PAGE_SIZE, max_model_len=40, max_queue_len=12)
        self.listener = Listener()
        self.feed = KVEventFeed(self.engine.scheduler.kv_journal(), self.listener.take, Metrics(), clock=lambda: 0.0)
        self.names: list[str] = []
        self.fetching: dict[str, Reserved] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.roots = {self.index.root_key(salt) for salt in ("", "blue")}

    @property
    def index(self) -> Any:
        return self.engine.scheduler._table.pages._index

    def add(self) -> None:
        name, chance = f"r{len(self.names)}", self.random
        prompt = tuple(range(1, chance.randint(2, 30)))
        prompt = prompt[: chance.randint(1, len(prompt))] + tuple(chance.choices(range(31), k=chance.randint(0, 5)))
        asked = request(
            name,
            prompt,
            chance.randint(1, 9),
            salt=chance.choice(["", "", "blue"]),
            deadline_s=self.engine.now_s + chance.choice([3.0, 1e9]),
        )
        try:
            self.engine.add(asked, remote=self.engine.scheduler._limits.role is Role.DECODE and chance.random() < 0.7)
        except (InvalidRequest, Overloaded):
            return
        self.names.append(name)
        self.tokens[name] = asked.token_ids

    def step(self) -> None:
        if len(self.engine.in_flight) < 2:
            self.engine.step()
        for reserved in self.engine.scheduler.take_reserved():
            self.fetching[reserved.request_id] = reserved

    def kv_arrives(self) -> None:
        if not self.fetching:
            return
        name = self.random.choice(sorted(self.fetching))
        reserved, tokens = self.fetching.pop(name), self.tokens[name]
        scheduler = self.engine.scheduler
        if name not in scheduler._table.live:
            return
        output = scheduler.remote_first_token(name, Output(request_id=name, token_ids=(next_token(tokens),)))
        self.engine.collect([output])
        device = self.engine.device
        device.import_tokens(reserved.page_table, tokens, reserved.held_tokens, len(tokens), device.salts[name])
        scheduler.kv_arrived(name)

    def end_one(self) -> None:
        """Cancel any request, over or not."""
        if self.names:
            name = self.random.choice([*self.engine.scheduler._table.live, *self.names[-2:]])
            self.fetching.pop(name, None)
            self.engine.scheduler.cancel(name)

    def time_passes(self) -> None:
        self.engine.now_s += self.random.choice([0.1, 2.0])
        outputs = self.engine.scheduler.expire(self.engine.now_s)
        for output in outputs:
            self.fetching.pop(output.request_id, None)
        self.engine.collect(outputs)

    def reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def check(self) -> None:
        """Keys, parents and tokens are those of the index; tokens as the device has them in its memory."""
        known = self.listener.pages
        assert set(known) == set(self.index.indexed())
        assert self.engine.scheduler.snapshot()["prefix_cache"] == {"pages": len(known), "digest": digest(known)}
        for key, (parent, tokens) in known.items():
            (page,) = self.index.match_keys([key])
            assert list(tokens) == [cell.token for cell in self.engine.device.pages.cells[page] if cell]
            parents = self.roots if parent is None else {parent}
            assert key in {self.index.next_key(candidate, tokens) for candidate in parents}


@pytest.mark.covers("V37")
@pytest.mark.parametrize("role", [Role.UNIFIED, Role.DECODE, Role.PREFILL], ids=lambda role: role.value)
def test_ten_thousand_operations_and_the_listener_knows_the_index(role: Role) -> None:
    worker = Worker(role, seed=7)
    operations = [worker.add, worker.step, worker.engine.commit_one, worker.kv_arrives, worker.end_one]
    operations += [worker.time_passes, worker.reset]
    weights = [6, 12, 12, 6, 8 if role is Role.PREFILL else 2, 1, 0.02]
    sizes: set[int] = set()
    for number in range(1, NUM_OPERATIONS + 1):
        worker.random.choices(operations, weights)[0]()
        is_check = number % (NUM_OPERATIONS // NUM_CHECKS) == 0
        if is_check or worker.random.random() < 0.2:  # a batch holds several operations, as a tick does
            worker.feed.publish()
        if is_check:
            worker.check()
            sizes.add(len(worker.listener.pages))
    kinds = {type(event) for event in worker.listener.seen}
    assert kinds == {Stored, Removed, Cleared}
    assert len(sizes) > 4, "the set hardly ever changed"
    assert worker.listener.sequence > 500


def test_pages_of_one_prefix_are_one_event_that_starts_where_known_pages_end() -> None:
    worker = Worker(Role.UNIFIED, seed=0)
    for name, length in (("short", 8), ("long", 16)):
        worker.engine.add(request(name, tuple(range(1, length + 1)), 1))
        worker.engine.run()
        worker.feed.publish()
    first, second = worker.listener.seen
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.parent, first.token_ids) == (None, tuple(range(1, 9)))
    assert (second.parent, second.token_ids) == (first.keys[-1], tuple(range(9, 17)))
    assert first.root == second.root == worker.index.root_key("")
    worker.check()


def test_nothing_is_published_when_nothing_changed_and_evictions_are_one_event() -> None:
    journal, batches, metrics = PrefixJournal(), [], Metrics()
    feed = KVEventFeed(journal, batches.append, metrics, clock=lambda: 5.0)
    feed.publish()
    journal.removed(b"a")
    journal.removed(b"b")
    journal.cleared()
    journal.removed(b"c")
    feed.publish()
    feed.publish()
    assert batches == [Batch(1, 5.0, (Removed((b"a", b"b")), Cleared(), Removed((b"c",))))]
    assert 'jdisagg_kv_events_total{kind="removed"} 2.0' in metrics.text()
    assert 'jdisagg_kv_events_total{kind="cleared"} 1.0' in metrics.text()


def test_recording_is_off_until_somebody_asks_and_has_one_reader_from_the_start() -> None:
    engine = FakeEngine()
    assert engine.scheduler._table.pages._journal is None
    engine.add(request("r", tuple(range(1, 9)), 1))
    engine.run()
    with pytest.raises(AssertionError, match="before anybody recorded"):
        engine.scheduler.kv_journal()
    fresh = FakeEngine()
    fresh.scheduler.kv_journal()
    with pytest.raises(AssertionError, match="reader already"):
        fresh.scheduler.kv_journal()
