"""A key for clients beside the one that the processes of a fleet share."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.api import channels
from jdisagg.api.channels import Credentials
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import admin_pb2, admin_pb2_grpc
from tests.unit.wire.rig import run_quiet
from tests.unit.wire.test_api_key import KEY, METHODS, REFLECTION, Everything, code_of


def test_the_key_of_clients_opens_what_clients_use_and_nothing_else(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        async with Everything(tokenizer, Credentials(api_key=KEY, client_api_key="an0ther\ncl1ents")) as server:
            channel = channels.open_channel(server.address, Credentials(api_key="cl1ents"))
            codes = {method: await code_of(channel, method, None) for method in (*METHODS, REFLECTION)}
            opened = {method for method, code in codes.items() if code is not grpc.StatusCode.UNAUTHENTICATED}
            assert opened == {method for method in METHODS if method[0] == "jdisagg.v1.GenerationService"}
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="the one sent is --client-api-key"):
                await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
            assert (server.drains, server.posted) == (0, [])
            friend = channels.open_channel(server.address, Credentials(api_key=KEY))
            for method in METHODS:
                assert await code_of(friend, method, None) is not grpc.StatusCode.UNAUTHENTICATED
            await channel.close()
            await friend.close()

    run_quiet(body())
