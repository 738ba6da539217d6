"""What a router's link makes of its worker's silence, of its death and of a bug: each has its own word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from jdisagg.api.pulse import Pulse
from jdisagg.api.worker.client import CLOSED, SILENT, WorkerLink
from jdisagg.api.worker.service import WorkerService
from jdisagg.v1 import worker_pb2_grpc
from tests.unit.router.fakes import ArithmeticEngine, FakeWorker
from tests.unit.wire.rig import FAST, request, run_quiet, start_server, until
from tests.unit.wire.router_link import Client


def test_links_tell_death_and_absence_apart():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        await until(lambda: client.ups)
        worker.engine.frozen = True
        client.link.submit(request("r"))
        await asyncio.sleep(0.5)
        assert client.downs == [], "an engine that stands still ends its process by itself"
        await worker.die()
        await until(lambda: client.downs)
        assert client.downs[0].startswith(("UNAVAILABLE", "INTERNAL")), "the latter where a heartbeat met the end of the stream"
        nobody = Client(worker.address)
        await until(lambda: nobody.downs)
        assert (nobody.ups, len(nobody.downs)) == (0, 1)

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


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("fails", ["grpc.aio._channel.Channel.close", "jdisagg.api.worker.client.open_channel"])
def test_a_connection_that_cannot_be_opened_or_closed_is_told_of(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes out of gRPC there: a router that does not hear of it connects that worker no more."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("a bug of gRPC")

    async def body() -> None:
        closes = fails.endswith("close")
        worker = await FakeWorker(()).start()
        with monkeypatch.context() as patch:
            patch.setattr(fails, fail)
            client = Client(worker.address)
            if closes:
                await until(lambda: client.ups)
                worker.engine.crash()
            await until(lambda: client.downs or client.link._task.done())
        assert [down.partition(":")[0] for down in client.downs] == ["UNAVAILABLE" if closes else "OSError('a bug of gRPC')"]
        await client.link.close()
        await worker.die()

    run_quiet(body())
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug of gRPC"]


@pytest.mark.parametrize(
    "side",
    [
        *("worker reads", "worker writes", "worker encodes", "worker encodes beside", "worker beats"),
        *("router reads", "router writes", "router decodes beside", "router listens"),
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
        elif side == "worker beats":
            monkeypatch.setattr("jdisagg.api.worker.service._RunStream.beat", lambda run: link.answered and fail())
        server, address = await start_server(
            lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(engine, FAST), server)
        )
        link = WorkerLink(
            address,
            config=FAST,
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
        elif side == "router listens":
            monkeypatch.setattr(link._pulse, "_count", lambda may_decide: fail())
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
