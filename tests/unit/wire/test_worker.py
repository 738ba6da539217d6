"""Run streams, registration, admin, health: over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from time import monotonic

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jdisagg.api import channels
from jdisagg.api.admin import AdminService
from jdisagg.api.codec import encode_request
from jdisagg.api.fleet.codec import decode_member
from jdisagg.api.generation.token_engine import Health
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.api.pulse import Pulse
from jdisagg.api.worker.client import CLOSED, SILENT, WorkerLink
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.errors import InvalidRequest, Overloaded, Unavailable
from jdisagg.core.fleet import Load
from jdisagg.core.requests import FinishReason, Output, Role, SamplingParams
from jdisagg.v1 import admin_pb2, admin_pb2_grpc, common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.unit.router.fakes import ArithmeticEngine, FakeWorker, Router, expected
from tests.unit.wire.rig import FAST, IMPATIENT, pause, request, run_quiet, start_server, until


class Client:
    """A router's link with lists for callbacks."""

    def __init__(self, address: str, step_timeout_s: float = 0.3, waited_for_s: float = 0.0) -> None:
        self.ups = 0
        self.batches: list[list[Output]] = []
        self.downs: list[str] = []
        self.loads: list[Load] = []
        self.link = WorkerLink(
            address,
            config=FAST,
            step_timeout_s=step_timeout_s,
            on_outputs=self.batches.append,
            on_up=self._up,
            on_down=self.downs.append,
            on_load=lambda load, num_cancelled: self.loads.append(load),
            on_quiet=lambda is_quiet: None,
            waits=lambda silent_s: silent_s < waited_for_s,
        )

    def _up(self) -> None:
        self.ups += 1

    def outputs(self, request_id: str) -> list[Output]:
        return [output for batch in self.batches for output in batch if output.request_id == request_id]


def test_outputs_of_one_tick_share_a_message():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address, step_timeout_s=30.0)
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


def test_of_a_worker_that_is_not_heard_nobody_knows_whether_its_engine_stands_still() -> None:
    async def body() -> None:
        slow = dataclasses.replace(FAST, heartbeat_s=60.0, dead_after_s=120.0)
        worker = await FakeWorker((), config=slow).start()
        client = Client(worker.address, step_timeout_s=0.8 * FAST.dead_after_s, waited_for_s=3 * FAST.dead_after_s)
        await until(lambda: client.ups)
        worker.engine.frozen = True
        client.link.submit(request("r"))
        await until(lambda: client.downs)
        assert client.downs == [SILENT]
        await client.link.close()
        await worker.die()

    run_quiet(body())


def test_links_tell_death_stall_and_absence_apart():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        await until(lambda: client.ups)
        worker.engine.frozen = True
        await asyncio.sleep(0.5)
        assert client.downs == []  # an idle engine may sleep
        client.link.submit(request("r"))
        await until(lambda: client.downs)
        assert client.downs == ["its engine stood still with requests to run for --step-timeout-s"]
        again = Client(worker.address)
        await until(lambda: again.ups)
        await worker.die()
        await until(lambda: again.downs)
        assert again.downs[0].startswith(("UNAVAILABLE", "INTERNAL")), "the latter where a heartbeat met the end of the stream"
        nobody = Client(worker.address)
        await until(lambda: nobody.downs)
        assert (nobody.ups, len(nobody.downs)) == (0, 1)

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


@pytest.mark.covers("C12", "X25", "X12")
def test_workers_register_heartbeat_and_register_again():
    async def body() -> None:
        router = await Router().start()
        port = int(router.address.rpartition(":")[2])
        channel = channels.open_channel(router.address)
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="register again") as caught:
            await stub.Heartbeat(fleet_pb2.HeartbeatRequest(address="nobody:1", epoch="e"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError, match="janitor"):
            await stub.Register(fleet_pb2.RegisterRequest(member=fleet_pb2.Member(role="janitor")))
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(router.engine.workers.members)
        (member,) = [decode_member(item) for item in (await stub.List(fleet_pb2.ListRequest())).members]
        assert (member.role, member.address, member.card.vocab_size) == (Role.PREFILL, worker.address, 1000)
        await asyncio.sleep(2 * FAST.dead_after_s)
        assert router.engine.workers.members()  # heartbeats keep it
        await channel.close()
        await router.stop()
        await until(lambda: not worker.registration.registered()[router.address])
        again = await Router(config=IMPATIENT).start(port)
        await until(again.engine.workers.members)
        await worker.die()
        await until(lambda: not again.engine.workers.members())  # evicted
        await again.stop()

    run_quiet(body())


def test_admin_calls_what_it_was_given():
    async def body() -> None:
        drained: list[float] = []

        async def drain(deadline_s: float) -> int:
            drained.append(deadline_s)
            return 3

        async def reset() -> int:
            if drained:
                raise Unavailable("pages are being transferred; try again")
            return 17

        async def stats() -> dict[str, object]:
            return {"queues": {"waiting": 2}}

        service = AdminService(drain=drain, stats=stats, reset_prefix_cache=reset)
        server, address = await start_server(lambda s: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, s))
        channel = channels.open_channel(address)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        assert (await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).pages_freed == 17
        assert (await stub.Drain(admin_pb2.DrainRequest(deadline_ms=50))).unfinished == 3
        assert json.loads((await stub.Stats(admin_pb2.StatsRequest())).json) == {"queues": {"waiting": 2}}
        with pytest.raises(grpc.aio.AioRpcError, match="being transferred") as caught:
            await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
        await server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("fails", [False, True])
def test_a_drain_goes_through_when_its_client_hangs_up(fails: bool, caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        announcing, announced, admits = asyncio.Event(), asyncio.Event(), [True]

        async def drain(deadline_s: float) -> int:
            announcing.set()
            await announced.wait()
            admits[0] = False
            if fails:
                raise KeyError("our bug")
            return 0

        async def stats() -> dict[str, object]:
            return {}

        service = AdminService(drain=drain, stats=stats, reset_prefix_cache=None)
        server, address = await start_server(lambda s: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, s))
        channel = channels.open_channel(address)
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(deadline_ms=5000))
        await announcing.wait()
        call.cancel()
        await asyncio.sleep(0.2)
        announced.set()
        await until(lambda: not admits[0] and ("our bug" in caplog.text or not fails))
        await asyncio.sleep(0.05)
        assert ("our bug" in caplog.text) == fails
        await channel.close()
        await server.stop(0)

    run_quiet(body())


def test_resetting_a_prefix_cache_that_is_not_there_invites_no_retry():
    async def body() -> None:
        async def drain(deadline_s: float) -> int:
            return 0

        async def stats() -> dict[str, object]:
            return {}

        service = AdminService(drain=drain, stats=stats, reset_prefix_cache=None)
        server, address = await start_server(lambda s: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, s))
        channel = channels.open_channel(address)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="a router has no prefix cache; ask the workers") as caught:
            await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close()
        await server.stop(0)

    run_quiet(body())


def test_grpc_health_follows_the_engine_within_a_second_and_reflection_lists_services():
    async def body() -> None:
        status = Health(healthy=True, ready=True)
        server = channels.make_server()
        reporter = HealthReporter(server, ("jdisagg.v1.WorkerService",), lambda: status)
        address = channels.bind(server)
        await server.start()
        await reporter.start()
        channel = channels.open_channel(address)
        stub = health_pb2_grpc.HealthStub(channel)

        async def serving(name: str = "jdisagg.v1.WorkerService") -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        async def turns(to: bool) -> float:
            asked_s = 0.0
            while await serving() is not to:
                asked_s += await pause(0.02)
            return asked_s

        assert await serving()
        assert await serving("")
        status = Health(healthy=True, ready=False, reason="draining")
        assert await turns(False) < 1.0
        status = Health(healthy=True, ready=True)
        assert await turns(True) < 1.0
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert "jdisagg.v1.WorkerService" in listed
        assert await call.read() is grpc.aio.EOF
        await reporter.close()
        assert not await serving()
        await channel.close()
        await server.stop(0)

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


def test_a_stream_that_breaks_as_the_silence_gets_too_long_is_a_worker_lost_and_no_bug(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        both = asyncio.Event()

        async def silent(pulse: Pulse, beat: Callable[[], None]) -> None:
            await both.wait()

        async def broken(link: WorkerLink, call: grpc.aio.StreamStreamCall) -> None:
            await both.wait()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

        monkeypatch.setattr(Pulse, "run", silent)
        monkeypatch.setattr(WorkerLink, "_write", broken)
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        await asyncio.sleep(0.05)
        both.set()
        await until(lambda: client.downs)
        assert client.downs == [SILENT]
        await worker.die()

    run_quiet(body())
    assert not [record for record in caplog.records if record.exc_info], "it is no bug of ours"


@pytest.mark.parametrize(
    "side",
    [
        *("worker reads", "worker writes", "worker encodes", "worker encodes beside"),
        *("router reads", "router writes", "router decodes beside"),
    ],
)
def test_a_bug_that_ends_a_run_stream_is_no_end_in_good_order_and_in_the_log(
    side: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    async def body() -> None:
        engine, reasons = ArithmeticEngine(), list[str]()
        if side.endswith("beside"):
            monkeypatch.setattr("jdisagg.api.in_order.is_long", lambda output: True)
        if side.startswith("worker encodes"):
            monkeypatch.setattr("jdisagg.api.worker.service.encode_output", fail)
        server, address = await start_server(
            lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(engine, FAST), server)
        )
        link = WorkerLink(
            address,
            config=FAST,
            step_timeout_s=9.0,
            on_outputs=lambda outputs: None,
            on_up=lambda: None,
            on_down=reasons.append,
            on_load=lambda load, num_cancelled: None,
            on_quiet=lambda is_quiet: None,
            waits=lambda silent_s: False,
        )
        await until(lambda: link.answered)
        if side == "worker reads":
            engine.submit = fail
        elif side == "worker writes":
            monkeypatch.setattr("jdisagg.api.worker.service.encode_load", fail)
        elif side == "router reads":
            link._on_outputs = fail
        elif side == "router writes":
            monkeypatch.setattr("jdisagg.api.worker.client.encode_request", fail)
        elif side == "router decodes beside":
            monkeypatch.setattr(link._decoded, "_convert", fail)
        link.submit(request("r"))
        ticking = asyncio.create_task(engine.run())
        await until(lambda: reasons)
        assert "a bug of ours" in caplog.text
        assert reasons != [CLOSED]
        ticking.cancel()
        await asyncio.wait({ticking})
        await link.close()
        await server.stop(0)

    run_quiet(body())
