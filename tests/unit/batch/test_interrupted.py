"""A batch that is told to stop while it writes, or reads."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jdisagg.batch import __main__ as command_line
from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal
from jdisagg.batch.runner import Batch, run_batch
from jdisagg.batch.sender import Answer, Sender
from jdisagg.core.errors import Unavailable
from tests.unit.batch.command_line import arguments, write
from tests.unit.batch.fake_server import serving

HANG_S = 60.0
INTERRUPTED = "jdisagg.batch: interrupted; the same command goes on from here\n"


class SlowJournal(Journal):
    """On a disk that takes as long as the test wants."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_writing = False
        self.may_go_on = threading.Event()

    def append(self, finished: Iterable[tuple[int, dict[str, Any]]]) -> None:
        self.is_writing = True
        assert self.may_go_on.wait(HANG_S)
        super().append(finished)

    def publish(self, numbers: Iterable[int]) -> None:
        self.is_writing = True
        assert self.may_go_on.wait(HANG_S)
        super().publish(numbers)


class Counting(Sender):
    """Knows how many it has answers to."""

    num_answered = 0

    async def send(self, *arguments: Any) -> Answer:
        got = await super().send(*arguments)
        self.num_answered += 1
        return got


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"object": "text_completion"})


def cancelled(directory: Path, text: str, times: int = 1) -> tuple[Batch, bool]:
    """A batch of these lines, cancelled while something was being written; and whether its output was there when it ended."""
    batch = Batch(input=directory / "in.jsonl", output=directory / "out.jsonl")
    batch.input.write_text(text, encoding="utf-8")

    async def body() -> bool:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://fake") as client:
            with SlowJournal(batch.output, batch.header("fake")) as journal:
                run = asyncio.ensure_future(run_batch(batch, journal, Sender(client, patience_s=1.0), lambda *_: None))
                while not journal.is_writing:
                    assert not run.done(), "it writes before it ends"
                    await asyncio.sleep(0.005)
                for _ in range(times):
                    run.cancel()
                    await asyncio.sleep(0.02)
                assert not run.done(), "it waits for what is being written"
                journal.may_go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await run
                return batch.output.exists()

    return batch, asyncio.run(body())


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_being_journalled_when_a_batch_is_cancelled_gets_there(tmp_path: Path, times: int) -> None:
    batch, _ = cancelled(tmp_path, '{"prompt": "one"}\n', times)
    with Journal(batch.output, batch.header("fake")) as journal:
        assert 1 in journal


@pytest.mark.parametrize("times", [1, 2])
def test_an_output_that_is_being_written_when_a_batch_is_cancelled_is_whole(tmp_path: Path, times: int) -> None:
    _, was_there = cancelled(tmp_path, "\n", times)
    assert was_there
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("stops", [False, True])
def test_what_was_answered_while_another_line_was_being_journalled_gets_there_too(tmp_path: Path, stops: bool) -> None:
    """Whether the batch is cancelled, or ends as its server goes away."""
    batch = Batch(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")
    batch.input.write_text('{"prompt": "one"}\n' * 5, encoding="utf-8")
    num_asked = 0

    async def body() -> None:
        async def serve(request: httpx.Request) -> httpx.Response:
            nonlocal num_asked
            num_asked += 1
            number = num_asked
            while number > 1 and not journal.is_writing:
                await asyncio.sleep(0.005)
            if number < 5:
                return answer(request)
            while not stops or sender.num_answered < 4:
                await asyncio.sleep(0.005)
            raise httpx.ConnectError("refused")

        async with httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://fake") as client:
            sender = Counting(client, patience_s=0.0)
            with SlowJournal(batch.output, batch.header("fake")) as journal:
                run = asyncio.ensure_future(run_batch(batch, journal, sender, lambda *_: None))
                while not (journal.is_writing and num_asked == 5 and sender.num_answered == 4):
                    await asyncio.sleep(0.005)
                if not stops:
                    run.cancel()
                await asyncio.sleep(0.05)
                journal.may_go_on.set()
                with pytest.raises(Unavailable if stops else asyncio.CancelledError):
                    await run

    asyncio.run(body())
    with Journal(batch.output, batch.header("fake")) as journal:
        assert [number for number in range(1, 6) if number in journal] == [1, 2, 3, 4]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of a process as it starts; a batch leaves them so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    yield
    now = signal.signal(signal.SIGINT, before[0]), signal.getsignal(signal.SIGTERM)
    assert now == (signal.default_int_handler, before[1])


def hit_by(sent: signal.Signals) -> Callable[..., None]:
    """A pass over a large file, without a loop that hears signals."""

    def long_pass(*_: object, **__: object) -> None:
        assert signal.getsignal(sent) is not signal.SIG_DFL, "it ends the process"
        signal.raise_signal(sent)
        raise AssertionError("it goes on")

    return long_pass


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("within", ["left_journal", "summary"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_batch_ends_alike_at_both_signals_before_it_asks_and_behind_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], within: str, sent: signal.Signals
) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}']), tmp_path / "out.jsonl"
    with serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(command_line, within, hit_by(sent))
            assert main(arguments(source, output, server.url)) == 1
        assert capsys.readouterr().err == INTERRUPTED
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 1


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_so_does_one_that_looks_at_the_output_which_another_process_has_finished_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sent: signal.Signals
) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}']), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        finished = output.read_bytes()
        output.unlink()
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(command_line, "check_writable", lambda output: output.write_bytes(finished))
            patch.setattr(command_line, "check_finished", hit_by(sent))
            assert main(arguments(source, output, server.url)) == 1
        assert capsys.readouterr().err == INTERRUPTED
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 1
