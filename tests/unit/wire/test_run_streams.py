"""Run streams over real sockets: what a worker owes to the requests of each, and to none but these."""

from __future__ import annotations

import asyncio
import dataclasses
from time import monotonic

import grpc
import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.codec import encode_request
from jdisagg.core.errors import InvalidRequest, Overloaded, Unavailable
from jdisagg.core.requests import FinishReason, SamplingParams
from jdisagg.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.unit.router.fakes import FakeWorker, expected
from tests.unit.wire.rig import FAST, pause, request, run_quiet, until
from tests.unit.wire.router_link import Client


def test_outputs_of_one_tick_share_a_message():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        asked = [request(f"r{i}", prompt=(i, 1), sampling=SamplingParams(max_tokens=12)) for i in range(20)]
        worker.engine.frozen = True
        for one in asked:
            client.link.submit(one)
        await until(lambda: len(worker.engine.live) == 20)
        worker.engine.frozen = False  # all of them have their first tick together
        await until(lambda: sum(output.finish is not None for batch in client.batches for output in batch) == 20)
        for one in asked:
            assert [token for output in client.outputs(one.request_id) for token in output.token_ids] == expected(one)
        assert len(client.batches) <= 12  # a tick each, not 240
        assert client.ups == 1
        assert {load.running for load in client.loads} == {0, 20}, "it tells with each message, not at heartbeats alone"
        await client.link.close()
        await until(lambda: worker.service.num_streams == 0)
        assert client.downs == []
        await worker.die()

    run_quiet(body())


def test_the_end_of_a_run_stream_cancels_its_requests_and_no_others():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        one, other = Client(worker.address), Client(worker.address)
        one.link.submit(request("mine", sampling=SamplingParams(max_tokens=10_000)))
        other.link.submit(request("theirs", sampling=SamplingParams(max_tokens=10_000)))
        await until(lambda: len(worker.engine.live) == 2)
        await one.link.close()
        await until(lambda: list(worker.engine.live) == ["theirs"])
        other.link.cancel("theirs", 7)  # another attempt: not this one
        await asyncio.sleep(0.1)
        assert worker.engine.live
        other.link.cancel("theirs", 0)
        await until(lambda: not worker.engine.live)
        await other.link.close()
        await worker.die()

    run_quiet(body())


def test_an_older_attempt_that_comes_late_and_is_refused_takes_the_newer_one_from_nobody():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        channel = channels.open_channel(worker.address)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Run()

        async def submit(attempt: int) -> None:
            asked = encode_request(request("r", attempt=attempt, sampling=SamplingParams(max_tokens=10_000)), monotonic())
            await call.write(worker_pb2.RunRequest(submits=[worker_pb2.Submit(request=asked)]))

        await submit(1)
        await until(lambda: worker.engine.live)
        worker.engine.refuse = Unavailable("it is running here already")
        await submit(0)
        await until(lambda: len(worker.engine.seen) == 2)
        call.cancel()
        await until(lambda: worker.service.num_streams == 0)
        assert not worker.engine.live, "it runs on for nobody"
        await channel.close()
        await worker.die()

    run_quiet(body())


@pytest.mark.parametrize("lease_s", [1.5, 30.0])
def test_a_router_that_says_nothing_keeps_its_requests_for_a_lease(lease_s: float, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        worker = await FakeWorker((), config=dataclasses.replace(FAST, lease_s=lease_s)).start()
        channel = channels.open_channel(worker.address)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        asked = encode_request(request("r", sampling=SamplingParams(max_tokens=10_000)), monotonic())
        await call.write(worker_pb2.RunRequest(submits=[worker_pb2.Submit(request=asked)]))
        await until(lambda: worker.engine.live)
        silent_s = 0.0
        while silent_s < 2 * FAST.dead_after_s:
            silent_s += await pause(0.01)
        assert worker.engine.live, "nobody else can go on with it"
        if lease_s < 2.0:
            await until(lambda: not worker.engine.live)
            await until(lambda: worker.service.num_streams == 0)
            await until(lambda: "no heartbeat for 1.50 s; its requests are cancelled" in caplog.text)
        call.cancel()
        await channel.close()
        await worker.die()

    run_quiet(body())


def test_a_stream_that_means_another_process_is_told_so_and_gives_up_nothing() -> None:
    async def body() -> None:
        worker = await FakeWorker((), epoch="mine").start()
        channel = channels.open_channel(worker.address)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        right, wrong = stub.Run(), stub.Run()
        submit = worker_pb2.Submit(
            request=encode_request(request("r", sampling=SamplingParams(max_tokens=10_000)), monotonic())
        )
        await right.write(worker_pb2.RunRequest(submits=[submit], router="one", opened=7, epoch="mine"))
        await until(lambda: worker.engine.live)
        await pause(3 * FAST.heartbeat_s)
        await wrong.write(worker_pb2.RunRequest(submits=[submit], router="one", opened=8, epoch="another's"))
        with pytest.raises(grpc.aio.AioRpcError, match="this is a fake, and another process is meant") as raised:
            await wrong.read()  # the first word of it
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert len(worker.engine.seen) == 1
        assert worker.engine.live
        assert worker.service.num_streams == 1
        right.cancel()
        await channel.close()
        await worker.die()

    run_quiet(body())


@pytest.mark.parametrize("newest_comes", ["first", "last"])
def test_of_two_streams_of_a_router_the_one_it_opened_last_stays_whichever_is_heard_first(newest_comes: str) -> None:
    async def body() -> None:
        worker = await FakeWorker(()).start()
        channel = channels.open_channel(worker.address)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        attempts = (1, 0) if newest_comes == "first" else (0, 1)
        calls = {attempt: stub.Run() for attempt in attempts}
        for attempt in attempts:
            asked = encode_request(request("r", attempt=attempt, sampling=SamplingParams(max_tokens=10_000)), monotonic())
            submit = worker_pb2.Submit(request=asked)
            await calls[attempt].write(worker_pb2.RunRequest(submits=[submit], router="one", opened=7 + attempt))
            await until(lambda: worker.engine.live)
        async for _ in calls[0]:
            pass
        assert await calls[0].code() is grpc.StatusCode.OK
        await until(lambda: worker.engine.live["r"][0].attempt == 1)
        assert worker.service.num_streams == 1
        assert [asked.attempt for asked in worker.engine.seen] == ([1] if newest_comes == "first" else [0, 1])
        calls[1].cancel()
        await channel.close()
        await worker.die()

    run_quiet(body())


def test_a_malformed_submit_fails_alone():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        channel = channels.open_channel(worker.address)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        bad = worker_pb2.Submit(request=common_pb2.EngineRequest(request_id="bad", attempt=3))
        good = common_pb2.EngineRequest(request_id="good", prompt_token_ids=[1], deadline_ms=5000)
        good.sampling.max_tokens = 3
        await call.write(worker_pb2.RunRequest(submits=[bad, worker_pb2.Submit(request=good)]))
        ends: dict[str, common_pb2.Output] = {}
        async for message in call:
            ends |= {output.request_id: output for output in message.outputs if output.finish}
            if len(ends) == 2:
                break
        assert (ends["bad"].error.code, ends["bad"].attempt) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], 3)
        assert ends["good"].finish == common_pb2.FINISH_REASON_LENGTH
        call.cancel()
        await channel.close()
        await worker.die()

    run_quiet(body())


def test_a_refused_request_ends_with_its_error_through_the_link():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        for error in (InvalidRequest("n is 0", field="n"), Overloaded("full", retry_after_s=2.0)):
            worker.engine.refuse = error
            client.batches.clear()
            client.link.submit(request("r"))
            await until(lambda: client.batches)
            (output,) = client.outputs("r")
            assert output.finish is FinishReason.ERROR
            assert type(output.error) is type(error)
            assert vars(output.error) == vars(error)
        await client.link.close()
        await worker.die()

    run_quiet(body())


def test_a_worker_whose_engine_raises_breaks_its_streams_and_gives_nothing_back() -> None:
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        client.link.submit(request("r", sampling=SamplingParams(max_tokens=10_000)))
        await until(lambda: client.outputs("r"))
        worker.engine.crash()
        await until(lambda: client.downs)
        assert client.downs == ["UNAVAILABLE: its engine has stopped; see its log"]
        assert all(output.error is None for output in client.outputs("r"))
        again = Client(worker.address)
        await until(lambda: again.downs)
        assert again.ups == 0, "a router would take it for one that lives"
        await worker.die()

    run_quiet(body())
