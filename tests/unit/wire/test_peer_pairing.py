"""Hello: which two workers pair, over which backends, and what is said to those that do not."""

from __future__ import annotations

import dataclasses

import pytest

from jdisagg.api.codec import encode_request
from jdisagg.api.peer import server as peer_server
from jdisagg.api.peer.codec import decode_down
from jdisagg.handoff.identity import PROTOCOL, Agreement, Backend, CacheGroup
from jdisagg.handoff.messages import Agreed, Open, StreamEnded
from jdisagg.kv.spec import KVSpec
from jdisagg.v1 import peer_pb2
from tests.unit.wire.peers import H1, H2, OTHER_SHM, SHM, Decode, Prefill, opening
from tests.unit.wire.rig import identity, request, run_quiet, until

JAX = Backend(name="jax", version="0.10.2", num_transport_addresses=2)
GRPC = Backend(name="grpc")
SPEC = KVSpec(num_layers=2, num_kv_heads=2, features=8, dtype="float32")


@pytest.mark.covers("P09")
@pytest.mark.parametrize(
    ("of_p", "of_d", "agreed"),
    [
        ((SHM, GRPC), (SHM, GRPC), ("shm", "grpc")),
        ((GRPC, SHM), (SHM, GRPC), ("shm", "grpc")),
        ((SHM, GRPC), (OTHER_SHM, GRPC), ("grpc",)),
        ((JAX, GRPC), (JAX, GRPC), ("jax", "grpc")),
        ((JAX, GRPC), (dataclasses.replace(JAX, version="0.11"), GRPC), ("grpc",)),
        ((JAX, GRPC), (dataclasses.replace(JAX, num_transport_addresses=1), GRPC), ("grpc",)),
        ((GRPC,), (JAX, GRPC), ("grpc",)),
    ],
)
def test_both_sides_know_the_backends_they_share_in_the_order_of_d(of_p, of_d, agreed):
    async def body() -> None:
        p, d = Prefill(identity(backends=of_p)), Decode(identity(epoch="d", backends=of_d))
        d.client.open(await p.start(), H1, dataclasses.replace(opening(), head_shards=4))
        await until(p.opened)
        said = p.opened()[0].message
        assert (said.backend, said.backends, said.head_shards) == (agreed[0], agreed, 4)
        assert [event.message for event in d.events] == [Agreed(backends=agreed)], "before anything P says"
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_an_open_of_a_peer_that_knows_one_backend_means_that_one_alone():
    wire = peer_pb2.PrefillRequest(open=peer_pb2.Open(request=encode_request(request(), 0.0), epoch="e", backend="grpc"))
    decoded = decode_down(wire, 0.0)
    assert isinstance(decoded, Open)
    assert (decoded.backend, decoded.backends, decoded.head_shards) == ("grpc", (), 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "weights-2"}, "fingerprint: wanted weights-1, got weights-2"),
        (
            {"fingerprint": "weights-2", "fingerprint_parts": (("numerics", "fast"),)},
            "numerics: wanted exact, got fast",
        ),
        ({"min_protocol": 7, "max_protocol": 9}, r"protocol: wanted \[1, 2\], got \[7, 9\]"),
        ({"groups": ()}, "groups: wanted 1, got 0"),
        (
            {"groups": (CacheGroup(spec=dataclasses.replace(SPEC, num_kv_heads=4), page_size=16),)},
            r"groups\[0\].num_kv_heads: wanted 2, got 4",
        ),
        ({"backends": (Backend(name="shm"),)}, "backends: wanted grpc, got shm"),
        ({"groups": (), "build": "1.2"}, "serve pid 1 @ here: groups"),
        ({"groups": (), "build": "1.3"}, r"serve pid 1 @ here \(builds 1.2 and 1.3\): groups"),
    ],
)
def test_hello_refuses_an_unlike_peer_and_names_the_field(changes, field):
    async def body() -> None:
        p, d = Prefill(identity(fingerprint_parts=(("numerics", "exact"),), build="1.2")), Decode(identity(**changes))
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(lambda: d.ends(H1))
        (ended,) = d.messages(H1)
        assert isinstance(ended, StreamEnded)
        assert ended.reason == "hello"
        with pytest.raises(Exception, match=field):
            raise ended.error or AssertionError("no error")
        assert not d.usable(address)
        assert p.opened() == []
        assert d.client.is_doubtful(address), "others are asked first"
        p.service._identity = d.client._identity  # as if it had been started again, and rightly
        d.client.open(address, H2, opening())
        await until(lambda: d.usable(address))
        assert not d.client.is_doubtful(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_decode_worker_that_pairs_with_nobody_of_another_build_names_that_peer_once(monkeypatch, caplog):
    """P, which is of another build, would have paired."""
    agreed = Agreement(protocol=PROTOCOL, backends=("grpc",))
    monkeypatch.setattr(peer_server, "agree", lambda producer, consumer: agreed)

    async def body() -> None:
        p, d = Prefill(identity(build="1.2")), Decode(identity(groups=(), build="1.3"))
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(lambda: d.ends(H1))
        told = f"prefill peer {address}: groups: wanted 1, got 0; pair workers that agree on it (builds 1.2 and 1.3)"
        assert told in str(d.messages(H1)[-1].error)
        (line,) = (message for message in caplog.messages if "builds" in message)
        assert line.count(address) == 1
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_page_size_and_dtype_may_differ_and_watched_peers_become_usable():
    async def body() -> None:
        theirs = CacheGroup(spec=dataclasses.replace(SPEC, dtype="bfloat16"), page_size=64)
        p, d = Prefill(identity()), Decode(identity(groups=(theirs,)))
        address = await p.start()
        assert not d.usable(address)
        d.client.watch((address,))
        await until(lambda: d.usable(address))
        await p.server.stop(0)
        await until(lambda: not d.usable(address))
        await d.client.aclose()

    run_quiet(body())
