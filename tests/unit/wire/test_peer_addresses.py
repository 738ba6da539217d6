"""Which prefill worker a stream and a fetch reach, and what an address that is none of a prefill worker's answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from time import monotonic

import grpc
import grpc.aio
import pytest

from jdisagg.api.channels import NO_GRPC
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.staged import StagedApp
from jdisagg.api.listening import listen
from jdisagg.api.peer.book import USELESS_S, PeerBook
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.api.peer.piece_server import NO_PREFILL
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Unavailable
from jdisagg.core.fleet import SUSPECT_S
from jdisagg.handoff.messages import Accepted, HandoffId, StreamEnded
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.ports import kept_port
from tests.unit.reading import read_whole
from tests.unit.wire.peers import Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, start_server, until

NUM_WORKERS = 3


@pytest.mark.covers("X10")
def test_every_hand_off_and_every_fetch_reaches_the_worker_it_names():
    async def body() -> None:
        workers = [Prefill(identity(worker=f"p{index}", epoch=f"e{index}")) for index in range(NUM_WORKERS)]
        addresses = [await worker.start() for worker in workers]
        d, source = Decode(), GrpcByteSource()
        handoffs = [HandoffId(f"r{number}", number) for number in range(2 * NUM_WORKERS)]
        for number, handoff in enumerate(handoffs):  # each worker's second stream goes over the connection of its first
            d.client.open(addresses[number % NUM_WORKERS], handoff, opening(handoff.request_id))
        await until(lambda: all(len(worker.opened()) == 2 for worker in workers))
        for index, worker in enumerate(workers):
            asked = sorted(opened.message.request.request_id for opened in worker.opened())
            assert asked == [f"r{index}", f"r{index + NUM_WORKERS}"]
            worker.pieces["same key"] = f"bytes of worker {index}".encode()
            for opened in worker.opened():
                opened.reply.send(Accepted(cached_tokens=index))
        await until(lambda: all(d.messages(handoff) for handoff in handoffs))
        for number, handoff in enumerate(handoffs):
            assert d.messages(handoff) == [Accepted(cached_tokens=number % NUM_WORKERS)]
        for index in (2, 0, 1, 0):
            read = await asyncio.to_thread(read_whole, source, addresses[index], "same key", monotonic() + 5)
            assert read == f"bytes of worker {index}".encode()
        source.close()
        await d.client.aclose()
        for worker in workers:
            await until(lambda worker=worker: len(worker.ends()) == 2)
            await worker.server.stop(0)

    run_quiet(body())


class StrangeServer(peer_pb2_grpc.PeerServiceServicer):
    """Answers Hello, in its way."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def Hello(self, request: peer_pb2.HelloRequest, context: grpc.aio.ServicerContext) -> peer_pb2.HelloResponse:
        if self._how == "raises":
            raise TypeError("cannot unpack non-iterable NoneType object")
        if self._how == "not found":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such worker")
        return peer_pb2.HelloResponse()  # an identity in which everything is absent

    async def Prefill(
        self, request_iterator: AsyncIterator[peer_pb2.PrefillRequest], context: grpc.aio.ServicerContext
    ) -> None:
        raise AssertionError("nobody gets as far as this")


def test_a_watched_peer_that_takes_us_and_that_we_cannot_take_is_known_not_to_pair(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        server, address = await start_server(
            lambda server: peer_pb2_grpc.add_PeerServiceServicer_to_server(StrangeServer("says nothing"), server)
        )
        d = Decode()
        d.client.watch((address,))
        await until(lambda: d.client.is_down(address))
        assert "protocol: wanted" in d.client.failures()[address]
        handoff = HandoffId("r", 1)
        d.client.open(address, handoff, opening())
        await until(lambda: d.ends(handoff) == ["hello"])
        await asyncio.sleep(0.2)
        assert d.client.is_down(address)
        assert caplog.text.count("does not pair with us") == 1
        assert "answers again" not in caplog.text
        await d.client.aclose()
        await server.stop(0)

    run_quiet(body())


@pytest.mark.covers("X11")
@pytest.mark.parametrize(
    ("how", "reason", "text"),
    [
        ("raises", "unreachable", "Hello: UNKNOWN"),
        ("not found", "unreachable", "Hello: NOT_FOUND: no such worker"),
        ("says nothing", "hello", "protocol: wanted"),
        ("serves something else", "unreachable", f"Hello: UNIMPLEMENTED: {NO_PREFILL}"),
    ],
)
def test_a_useless_answer_to_hello_ends_its_hand_offs_with_an_error_and_no_other(how: str, reason: str, text: str):
    async def body() -> None:
        def add(server: grpc.aio.Server) -> None:
            if how != "serves something else":
                peer_pb2_grpc.add_PeerServiceServicer_to_server(StrangeServer(how), server)

        strange, address = await start_server(add)
        p, d = Prefill(identity()), Decode()
        lost, fine = [HandoffId("lost", 1), HandoffId("lost too", 2)], HandoffId("fine", 3)
        for handoff in lost:
            d.client.open(address, handoff, opening(handoff.request_id))
        d.client.open(await p.start(), fine, opening("fine"))
        await until(lambda: p.opened() and all(d.ends(handoff) for handoff in lost))
        for handoff in lost:
            (ended,) = d.messages(handoff)
            assert isinstance(ended, StreamEnded)
            assert (ended.reason, type(ended.error)) == (reason, Unavailable)
            assert address in str(ended.error)
            assert text in str(ended.error)
        assert not d.usable(address)
        assert d.ends(fine) == []
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(fine) == [Accepted(cached_tokens=0)])
        await d.client.aclose()
        await until(p.ends)
        for server in (strange, p.server):
            await server.stop(0)

    run_quiet(body())


def test_a_peer_that_was_not_reached_is_asked_last_until_it_answers():
    async def body() -> None:
        with kept_port() as port:
            address = f"127.0.0.1:{port}"
            p, d = Prefill(identity()), Decode()
            first, second = HandoffId("first", 1), HandoffId("second", 2)
            assert not d.client.is_doubtful(address), "nobody knows"
            d.client.open(address, first, opening("first"))
            await until(lambda: d.ends(first))
            assert d.client.is_doubtful(address)
            await p.start(port)
        d.client.open(address, second, opening("second"))
        await until(p.opened)
        assert not d.client.is_doubtful(address)
        await d.client.aclose()
        await until(p.ends)
        await p.server.stop(0)

    run_quiet(body())


def test_a_peer_that_was_not_reached_is_asked_like_others_after_a_while() -> None:
    book = PeerBook()
    book.failed("p", "nobody listens", 100.0)
    book.failed("q", "other weights", 100.0, refuses=True)
    book.drains("r")
    assert [book.is_doubtful(peer, 100.0 + SUSPECT_S - 0.1) for peer in "pqrs"] == [True, True, False, False]
    assert [book.is_doubtful(peer, 100.0 + SUSPECT_S) for peer in "pqrs"] == [False, True, False, False]
    book.answered("q")
    assert not book.is_doubtful("q", 100.0)


def test_a_peer_at_an_http_port_is_told_of_as_that_and_nobody_is_sent_to_look_at_its_advertise_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        server = HttpServer(StagedApp(), listen())
        await server.start()
        d, handoff = Decode(), HandoffId("lost", 1)
        d.client.open(server.address, handoff, opening(handoff.request_id))
        await until(lambda: d.ends(handoff))
        said = [record.getMessage() for record in caplog.records if "prefill peer" in record.getMessage()]
        assert said == [f"prefill peer {server.address} is down: Hello: UNAVAILABLE: it {NO_GRPC}"]
        await d.client.aclose()
        await server.stop(0.0)

    run_quiet(body())


def test_that_a_peer_speaks_no_grpc_is_news_behind_that_it_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    book = PeerBook()
    other = f"Hello: UNAVAILABLE: it {NO_GRPC}"
    for now_s, why in enumerate(("Hello: UNAVAILABLE: Connection refused", other, other)):
        book.failed("p", why, now_s)
    assert [record.getMessage() for record in caplog.records][1:] == [f"prefill peer p is down: {other}"]


def test_another_cause_is_told_of_once_while_a_peer_is_down(caplog: pytest.LogCaptureFixture) -> None:
    book = PeerBook()
    refused, key = "Hello: UNAVAILABLE: Connection refused", "Hello: UNAUTHENTICATED: API key is wrong"
    for now_s, why in enumerate((refused, refused, key, key, refused)):
        book.failed("p", why, now_s)
    said = [record.getMessage() for record in caplog.records]
    hint = "; if it runs, look at its --advertise-host and --advertise-port, and at firewalls"
    assert said == [f"prefill peer p is down: {why}" for why in (refused + hint, key)], "the hint is for what never answered"
    book.answered("p")
    book.failed("p", key, 10.0)
    assert len(caplog.records) == 3


CUT = (
    "prefill peer p: no heartbeat for 1.0 s",
    "prefill peer p: Hello: UNAVAILABLE: failed to connect to all addresses; tcp handshaker shutdown",
    "prefill peer p: Hello: DEADLINE_EXCEEDED: Deadline Exceeded",
    "prefill peer p: hand-off stream: UNKNOWN: Stream removed",
)


@pytest.mark.parametrize("causes", [CUT, CUT[::-1]])
def test_a_peer_that_is_not_heard_any_more_is_told_of_once_whatever_finds_it_out(
    causes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    book = PeerBook()
    book.answered("p")
    for now_s, why in enumerate(causes):
        book.failed("p", why, now_s)
    first = causes[0].removeprefix("prefill peer p: ")
    assert caplog.messages == [f"prefill peer p is down: {first}"]
    assert book.why("p") == causes[-1], "whoever asks hears the latest"
    book.failed("p", "prefill peer p: other weights", 10.0, refuses=True)
    book.answered("p")
    book.failed("p", causes[1], 20.0)
    assert len(caplog.messages) == 3, "another answer is news, and so is the next cut"


def test_a_peer_whose_kv_does_not_come_is_asked_last_for_a_while_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    book = PeerBook()
    book.answered("p")
    for now_s in (100.0, 110.0, 135.0, 165.0):  # those of a second request are no news; after a while it is again
        book.no_kv("p", "fetch of [0, 256) over tcp: stalled", now_s)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert told[0].startswith("prefill peer p answers, and its KV does not come (fetch of [0, 256) over tcp: stalled)")
    assert [book.is_doubtful("p", now_s) for now_s in (164.9, 194.9, 195.0)] == [True, True, False]
    assert book.why("p") == "", "it can be used"
    book.failed("p", "no heartbeat", 200.0)
    book.no_kv("p", "heartbeat", 200.0)
    assert caplog.records[-1].getMessage().startswith("prefill peer p sent no KV before it went down (heartbeat): others are")


def test_a_peer_whose_kv_does_not_come_is_of_no_use_for_a_while_or_until_some_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    book = PeerBook()
    for peer in "pqrs":
        book.answered(peer)
    book.failed("r", "gone", 100.0)
    for peer in "pqr":
        book.no_kv(peer, "stalled", 100.0)
    why = "it answers, and its KV does not come (stalled); look at MTU, firewalls and load between the two"
    after_s = 100.0 + 1.1 * TransferConfig().worker_wait_s
    assert book.obstacles(after_s) == {"p": why, "q": why, "r": "gone", "s": ""}, "a router gives up what waits for it first"
    book.kv_came("q")
    book.kv_came("nobody")
    assert book.obstacles(after_s) == {"p": why, "q": "", "r": "gone", "s": ""}
    assert book.is_doubtful("q", 129.9), "others are asked first all the same: a line may crawl"
    assert book.obstacles(100.0 + USELESS_S) == book.whys() == {"p": "", "q": "", "r": "gone", "s": ""}
    assert caplog.messages[-1] == "prefill peer q: its KV comes again"
