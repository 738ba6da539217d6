"""A process whose gRPC port accepts nobody any more ends; one that answers, however, does not."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from threading import Event
from typing import Any

import pytest

from jdisagg.api import listening
from jdisagg.api.channels import bind, make_server
from jdisagg.serve import accepting
from jdisagg.serve.accepting import EXIT_NOT_ACCEPTING, Heard, end_when_nobody_accepts
from jdisagg.serve.process import Process
from tests.unit.wire.rig import run_quiet, until

LOOKS = 5
MOST = 2  # connections, where there are few
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and settings: of HTTP/2, as gRPC begins


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for half a minute."""
    monkeypatch.setattr(accepting, "LOOK_S", 0.01)
    monkeypatch.setattr(accepting, "ANSWER_S", 0.1)


@asynccontextmanager
async def watched(address: str, on_full: Callable[[], object] = lambda: None) -> AsyncIterator[Process]:
    process = Process()
    watch = asyncio.create_task(end_when_nobody_accepts(process, address, on_full))
    yield process
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


async def answer(listener: socket.socket) -> None:
    """One connection."""
    listener.setblocking(False)
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection.send(b"a word")
    connection.close()


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)]
)
@pytest.mark.parametrize("backlog", [8, 0], ids=["there is room", "there is none"])
def test_a_process_drains_and_says_why_it_ends_whose_connections_nobody_takes(
    host: str, family: socket.AddressFamily, backlog: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        with socket.create_server((host, 0), family=family, backlog=backlog) as listener:
            port = listener.getsockname()[1]
            waiting = [socket.socket(family) for _ in range(2)]
            async with watched(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as process:
                await answer(listener)
                for one in waiting:
                    one.setblocking(False)
                    one.connect_ex(("::1" if family is socket.AF_INET6 else "127.0.0.1", port))
                await until(process.stopping.is_set)
            for one in waiting:
                one.close()
        assert process.status == EXIT_NOT_ACCEPTING

    run_quiet(body())
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert "accepts nobody any more" in caplog.text


async def goes_on(address: str, looks: Callable[[], int]) -> None:
    async with watched(address) as process:
        await until(lambda: looks() >= LOOKS)
        assert not process.stopping.is_set()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Heard]:
    """Whether each was answered."""
    seen, hear = list[Heard](), accepting._hear

    async def noted(address: str) -> Heard:
        seen.append(await hear(address))
        return seen[-1]

    monkeypatch.setattr(accepting, "_hear", noted)
    return seen


def test_a_server_of_grpc_answers_and_nothing_is_left_of_that(looks: list[Heard], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "ANSWER_S", 20.0)

    async def body() -> None:
        server = make_server()
        address = bind(server)
        await server.start()
        before = len(os.listdir("/proc/self/fd"))
        await goes_on(address, lambda: len(looks))
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        await server.stop(0)

    run_quiet(body())
    assert {*looks} == {Heard.A_WORD}


def test_a_port_that_hangs_up_on_one_too_many_is_none_that_accepts_nobody(looks: list[Heard]) -> None:
    async def body() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        await goes_on(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", lambda: len(looks))
        server.close()
        await server.wait_closed()

    run_quiet(body())
    assert {*looks} == {Heard.HUNG_UP}


def test_a_server_of_grpc_whose_connections_are_all_taken_says_so_now_and_then_until_one_ends(
    looks: list[Heard], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "ANSWER_S", 20.0)
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (MOST / listening.SHARE, 4096))

    told: list[None] = []

    async def body() -> None:
        server = make_server()
        address = bind(server)
        await server.start()
        port = int(address.rpartition(":")[2])
        taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST)]
        for reader, writer in taken:
            writer.write(PREFACE)
            assert await reader.read(1)
        async with watched(address, lambda: told.append(None)) as process:
            await until(lambda: looks.count(Heard.HUNG_UP) >= LOOKS)
            for _, writer in taken:
                writer.close()
            await until(lambda: Heard.A_WORD in looks)
            assert not process.stopping.is_set()
        await server.stop(0)

    run_quiet(body())
    assert len(told) == looks.count(Heard.HUNG_UP)
    (line,) = [record for record in caplog.records if record.name == accepting.__name__]
    assert line.levelname == "WARNING"
    assert f"keeps {MOST} connections, 40% of this process's descriptors, and all are taken" in line.getMessage()


def test_a_process_that_has_no_descriptor_to_try_with_does_not_end(looks: list[Heard], monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(*_: object) -> None:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(asyncio, "open_connection", none_left)
    run_quiet(goes_on("127.0.0.1:1", lambda: len(looks)))
    assert {*looks} == {Heard.NOBODY_KNOWS}


def test_an_address_that_never_answered_is_behind_a_firewall(looks: list[Heard]) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await goes_on(f"127.0.0.1:{listener.getsockname()[1]}", lambda: len(looks))

    run_quiet(body())
    assert {*looks} <= {Heard.NOTHING, Heard.NOBODY_KNOWS}


def test_a_port_for_whose_connections_there_is_no_descriptor_is_asked_again(
    looks: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            with monkeypatch.context() as patch:
                patch.setattr(accepting, "check_descriptors", none_left)
                async with watched(address) as process:
                    await answer(listener)
                    await until(lambda: looks.count(Heard.NOBODY_KNOWS) >= LOOKS)
                    assert not process.stopping.is_set()
                    patch.undo()
                    await until(process.stopping.is_set)

    run_quiet(body())


def test_a_port_that_was_silent_twice_and_then_answers_goes_on(looks: list[Heard], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "ANSWER_S", 0.5)

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with watched(f"127.0.0.1:{listener.getsockname()[1]}") as process:
                await answer(listener)
                for _ in range(2):
                    silent = looks.count(Heard.NOTHING)
                    await until(lambda before=silent: looks.count(Heard.NOTHING) >= before + accepting.MOST_SILENT - 1)
                    answered = looks.count(Heard.HUNG_UP)
                    while looks.count(Heard.HUNG_UP) == answered:
                        with suppress(BlockingIOError):
                            listener.accept()[0].close()
                        await asyncio.sleep(0.001)
                assert not process.stopping.is_set()

    run_quiet(body())


def test_a_resolver_that_does_not_answer_any_more_says_nothing_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end every process of a fleet."""
    monkeypatch.setattr("jdisagg.api.tasks.ONCE_MORE_S", 0.01)
    look_up, is_away, is_over = socket.getaddrinfo, Event(), Event()

    def resolver(host: str, *args: Any, **options: Any) -> Any:
        if host != "worker.test" or options.get("flags"):  # as no name
            return look_up(host, *args, **options)
        if is_away.is_set():
            is_over.wait(30.0)
        return look_up("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with watched(f"worker.test:{listener.getsockname()[1]}") as process:
                await answer(listener)
                is_away.set()
                await asyncio.sleep(10 * accepting.ANSWER_S)
                stopped = process.stopping.is_set()
                is_over.set()
                assert not stopped

    run_quiet(body())


def test_an_address_that_this_machine_has_no_more_says_nothing_of_the_port(
    looks: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an interface that went down, or a name that is another machine's now: what is sent there comes to nothing."""

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with watched(f"127.0.0.1:{listener.getsockname()[1]}") as process:
                await answer(listener)
                with monkeypatch.context() as patch:
                    patch.setattr(accepting, "is_own", lambda _: False)
                    await until(lambda: looks.count(Heard.NOBODY_KNOWS) >= LOOKS)
                    assert not process.stopping.is_set()
                await until(process.stopping.is_set)

    run_quiet(body())
