"""A fleet started with an API key: clients and strangers at its public edge, strangers at its workers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import grpc
import pytest

from jdisagg.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.client import OPTIONS
from tests.e2e.conftest import PATIENT, Start
from tests.e2e.processes import ServerProcess

KEY = "k3y-for-tests"
GOOD = (("authorization", f"Bearer {KEY}"),)


def generated(fleet: ServerProcess, metadata: tuple[tuple[str, str], ...]) -> list[int]:
    """Tokens of one request over gRPC."""
    asked = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=range(20, 60)),
        sampling=common_pb2.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    )
    with grpc.insecure_channel(fleet.grpc, options=OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return [token for message in stub.Generate(asked, timeout=60, metadata=metadata) for token in message.delta.token_ids]


def models(address: str) -> list[dict[str, object]]:
    """What GET /v1/models tells who has the key."""
    asked = urllib.request.Request(f"http://{address}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.load(answer)["data"]


def of_a_page(address: str) -> int:
    """HTTP status of what a browser sends for any page without asking."""
    headers = {"Origin": "https://page.example", "Content-Type": "text/plain"}
    asked = urllib.request.Request(f"http://{address}/v1/completions", b'{"prompt": "a"}', headers)
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def http_status(fleet: ServerProcess, headers: dict[str, str]) -> int:
    """Of GET /v1/models."""
    try:
        with urllib.request.urlopen(urllib.request.Request(fleet.http + "/v1/models", headers=headers), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.covers("X14")
def test_a_local_fleet_with_a_key_serves_who_has_it_and_nobody_can_drain_its_workers(
    start: Start, exact_flags: tuple[str, ...]
) -> None:
    flags = ("--role", "local", "--local-prefill", "never", "--served-model-name", "tiny", *PATIENT, *exact_flags)
    fleet = start("local", *flags, env={"JDISAGG_API_KEY": KEY}).wait_ready()
    assert len(generated(fleet, GOOD)) == 5  # computed on P, fetched by D: every internal service was used
    for address in (fleet.ready.http, *(child["http"] for child in fleet.ready.workers if child["role"] != "prefill")):
        [model] = models(address)  # of the router and of D: `vllm bench serve` loads its tokenizer by `root`
        assert (model["id"], model["root"]) == ("tiny", exact_flags[1])
        assert of_a_page(address) == 403
    assert http_status(fleet, {}) == 401
    with pytest.raises(grpc.RpcError) as caught:
        generated(fleet, ())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for child in fleet.ready.workers:
        with grpc.insecure_channel(child["grpc"], options=OPTIONS) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(deadline_ms=1), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, child
    assert len(generated(fleet, GOOD)) == 5
    assert KEY not in fleet.tail(10**6)
    assert fleet.stop() == 0
