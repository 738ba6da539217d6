"""A worker is a member of a router's fleet for as long as its heartbeats come, and registers again where they are not known."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.fleet.codec import decode_member
from jdisagg.core.requests import Role
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.wire.rig import FAST, IMPATIENT, run_quiet, until


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
