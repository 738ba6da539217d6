"""A batch that is told to stop while it writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jdisagg.batch.journal import Journal
from jdisagg.batch.runner import Batch, run_batch
from jdisagg.batch.sender import Sender

WRITE_S = 0.3


class SlowJournal(Journal):
    """On a slow disk."""

    is_writing = False

    def append(self, finished: Iterable[tuple[int, dict[str, Any]]]) -> None:
        self.is_writing = True
        time.sleep(WRITE_S)
        super().append(finished)

    def publish(self, numbers: Iterable[int]) -> None:
        self.is_writing = True
        time.sleep(WRITE_S)
        super().publish(numbers)


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"object": "text_completion"})


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_being_journalled_when_a_batch_is_cancelled_gets_there(tmp_path: Path, times: int) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "one"}\n', encoding="utf-8")
    batch = Batch(input=source, output=output)

    async def body() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://fake") as client:
            with SlowJournal(output, batch.header("fake")) as journal:
                run = asyncio.ensure_future(run_batch(batch, journal, Sender(client, patience_s=1.0), lambda _: None))
                while not journal.is_writing:
                    await asyncio.sleep(0.005)
                for _ in range(times):
                    run.cancel()
                    await asyncio.sleep(0.02)
                with pytest.raises(asyncio.CancelledError):
                    await run

    asyncio.run(body())
    with Journal(output, batch.header("fake")) as journal:
        assert 1 in journal


def test_an_output_that_is_being_written_when_a_batch_is_cancelled_is_whole(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n", encoding="utf-8")
    batch = Batch(input=source, output=output)

    async def body() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://fake") as client:
            with SlowJournal(output, batch.header("fake")) as journal:
                run = asyncio.ensure_future(run_batch(batch, journal, Sender(client, patience_s=1.0), lambda _: None))
                while not journal.is_writing:
                    await asyncio.sleep(0.005)
                run.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await run
                assert output.exists()

    asyncio.run(body())
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]
