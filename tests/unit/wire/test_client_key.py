"""A key for clients beside the one that the processes of a fleet share."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.api import api_key, channels
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


def test_clients_with_a_wrong_key_are_one_line_a_minute_and_hide_no_process_of_the_fleet(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(api_key, "monotonic", lambda: now_s[0])
    of_clients, of_the_fleet = "jdisagg.v1.GenerationService/GetModel", "jdisagg.v1.FleetService/Heartbeat"

    async def body() -> None:
        async with Everything(tokenizer, Credentials(api_key=KEY, client_api_key="cl1ent")) as server:
            channel = channels.open_channel(server.address)

            async def ask(method: str, key: str) -> None:
                service, name = method.split("/")
                await code_of(channel, (service, name, False, False), (("authorization", f"Bearer {key}"),))

            def told() -> list[str]:
                return [message for message in caplog.messages if "was refused: missing or wrong API key" in message]

            await ask(of_clients, "cl1ent")
            assert told() == []
            for _ in range(20):
                await ask(of_clients, "cl1entt")
            (line,) = told()
            assert line.startswith(f"/{of_clients} of ipv4:127.0.0.1:")
            await ask(of_the_fleet, "cl1entt")
            assert told()[1].startswith(f"/{of_the_fleet} of ")
            now_s[0] += 60.0
            await ask(of_clients, "cl1entt")
            assert told()[2].startswith(f"/{of_clients} of ")
            assert told()[2].endswith("; 19 more since it was last said")
            await channel.close()

    run_quiet(body())
    assert "cl1ent" not in caplog.text
