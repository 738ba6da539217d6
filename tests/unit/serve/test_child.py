"""A child process and its pipes."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest

from jdisagg.serve.child import Child, ChildSpec

TALKS = "import sys\nfor _ in range(40_000): print(100 * 'x', file=sys.stderr)"


def test_a_child_goes_on_when_nobody_reads_what_the_supervisor_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text[:20])

    async def body() -> None:
        child = await Child.start(ChildSpec(name="talker", command=lambda _: (sys.executable, "-c", TALKS)), None)
        monkeypatch.setattr(sys, "stderr", Closed())
        try:
            async with asyncio.timeout(120.0):
                assert await child.wait() == 0, "4 MB are more than all buffers on the way"
        finally:
            monkeypatch.undo()
            await child.stop(0.1)

    asyncio.run(body())
