"""KVEventsService over real sockets: listeners that come, lag, go and come back know what the prefix index holds."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.api.kv_cache_view import KVCacheView, SequenceGap
from jdisagg.api.kv_events.ring import KVEventRing
from jdisagg.kv.events import Batch, Cleared, Removed, Stored
from jdisagg.kv.prefix import PrefixIndex
from jdisagg.v1 import kv_events_pb2
from tests.unit.wire.kv_events_worker import HUGE_PAGE, PAGE_SIZE, Response, Worker, following, subscribed
from tests.unit.wire.rig import run_quiet, until


@pytest.mark.covers("V37")
def test_a_new_listener_gets_a_snapshot_and_then_every_batch():
    async def body() -> None:
        worker = await Worker().start()
        worker.serve(3)
        async with following(worker, KVCacheView()) as view:
            await until(lambda: worker.is_known_to(view))
            assert view.pages
            worker.serve(20)  # more than the pool holds: evictions
            await until(lambda: worker.is_known_to(view))
            assert view.num_snapshots == 1
            assert view.sequence > 40
            index = PrefixIndex(view.page_size)
            for key, page in view.pages.items():
                assert key == index.next_key(page.parent or index.root_key(""), page.token_ids)
            worker.reset()
            await until(lambda: not view.pages)
            worker.serve()
            await until(lambda: view.pages and worker.is_known_to(view))
            assert view.num_snapshots == 1
        await until(lambda: worker.listeners == 0)
        await worker.stop()

    run_quiet(body())


@pytest.mark.covers("V37")
def test_a_listener_that_comes_back_goes_on_where_it_was_and_gets_a_snapshot_when_that_is_gone():
    async def body() -> None:
        worker = await Worker(num_batches=10).start()
        worker.serve(4)
        await until(lambda: worker.ring.snapshot().sequence >= 8)
        latest = worker.ring.snapshot().sequence
        async with subscribed(worker, "epoch-1", latest - 2) as call:
            found: list[Response] = [await call.read() for _ in range(3)]
            assert [(m.sequence, m.snapshot, m.pool) for m in found] == [(latest - i, False, "unified") for i in (2, 1, 0)]
            assert found[0].timestamp_s > 1e9
            assert found[0].block_size == PAGE_SIZE
        async with subscribed(worker, "epoch-1", latest + 1) as call:  # nothing missed: the next one comes first
            await call.initial_metadata()
            worker.serve()
            first: Response = await call.read()
            assert (first.sequence, first.snapshot) == (latest + 1, False)
        latest = worker.ring.snapshot().sequence
        for epoch, sequence in (
            ("epoch-1", latest - 10),
            ("epoch-1", latest + 2),
            ("epoch-0", latest),
            ("", 0),
            ("epoch-1", -1),
        ):
            async with subscribed(worker, epoch, sequence) as call:
                first = await call.read()
                assert (first.sequence, first.snapshot, first.more) == (latest, True, False)
        async with subscribed(worker, "epoch-1", latest - 9) as call:  # the oldest that is kept
            first = await call.read()
            assert (first.sequence, first.snapshot) == (latest - 9, False)
        await worker.stop()

    run_quiet(body())


@pytest.mark.covers("V37")
def test_a_restarted_worker_is_another_epoch_and_the_view_starts_again():
    async def body() -> None:
        worker = await Worker().start()
        worker.serve(3)
        view = KVCacheView()
        async with following(worker, view):
            await until(lambda: worker.is_known_to(view))
            port = int(worker.address.rpartition(":")[2])
            await worker.stop()
            assert view.pages  # what was known last
            again = await Worker(epoch="epoch-2").start(port)
            again.serve()
            await until(lambda: again.is_known_to(view))
            assert (view.epoch, view.num_snapshots) == ("epoch-2", 2)
        await again.stop()

    run_quiet(body())


@pytest.mark.covers("V37")
def test_a_slow_listener_delays_nobody_and_gets_a_snapshot_in_its_stream():
    async def body() -> None:
        worker = await Worker(num_batches=8, page_size=HUGE_PAGE).start()
        quick, slow = KVCacheView(), KVCacheView()
        async with following(worker, quick), subscribed(worker) as call:
            slow.apply(await call.read())
            await until(lambda: quick.num_snapshots == 1)
            assert await worker.store_huge_pages(200) < 0.5  # 20 MB nobody reads: more than sockets hold
            await until(lambda: quick.sequence == 200, limit_s=90.0)
            while slow.sequence < 200:
                slow.apply(await asyncio.wait_for(call.read(), 30))
            assert slow.num_snapshots >= 2
            assert slow.pages == quick.pages
            assert len(slow.pages) == 200
        await until(lambda: worker.listeners == 0)
        await worker.stop()

    run_quiet(body())


def test_a_view_does_not_go_on_after_a_gap():
    def batch(sequence: int, epoch: str = "e") -> Response:
        return Response(epoch=epoch, sequence=sequence, block_size=1)

    view = KVCacheView()
    view.apply(Response(epoch="e", sequence=4, block_size=1, snapshot=True))
    view.apply(batch(5))
    for wrong in (batch(5), batch(7), batch(6, "other")):
        with pytest.raises(SequenceGap, match="wanted batch 6 of epoch 'e'"):
            view.apply(wrong)
    lost = batch(6)
    lost.events.add().removed.block_hashes.append(b"x")
    with pytest.raises(SequenceGap, match="never stored"):
        view.apply(lost)
    assert view.epoch == ""
    with pytest.raises(ValueError, match="update this client"):
        view.apply(Response(snapshot=True, block_size=1, events=[kv_events_pb2.KVEvent()]))


def test_a_ring_takes_every_batch_once():
    async def body() -> None:
        ring = KVEventRing(pool="p", epoch="e", page_size=1, num_batches=2, loop=asyncio.get_running_loop())
        waiting = asyncio.create_task(ring.read(1))
        await asyncio.sleep(0)
        ring.append(Batch(1, 0.0, (Stored((b"a",), None, (1,), b"r"),)))
        assert [batch.sequence for batch in await waiting] == [1]
        with pytest.raises(AssertionError, match="batch 3 after 1"):
            ring.append(Batch(3, 0.0, (Cleared(),)))
        ring.append(Batch(2, 0.0, (Removed((b"a",)),)))
        assert (ring.snapshot().sequence, ring.snapshot().pages) == (2, [])
        late = asyncio.create_task(ring.read(3))
        await asyncio.sleep(0)
        for sequence in (3, 4, 5, 6):
            ring.append(Batch(sequence, 0.0, (Cleared(),)))
        assert await late == []  # woken after the ring had passed on
        assert not ring.has(4)
        assert ring.has(5)

    run_quiet(body())
