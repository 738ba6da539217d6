"""What a batch says to nobody keeps it from nothing."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from jdisagg.batch.progress import say


def test_a_pipe_that_is_full_and_that_nobody_reads_does_not_stop_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, 4096 * b"x")
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    with os.fdopen(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        thread = threading.Thread(target=say, args=("1 ok, 0 failed",), daemon=True)
        thread.start()
        thread.join(60.0)
        was_kept = thread.is_alive()
        os.read(reader, 2**20)
    os.close(reader)
    assert not was_kept
