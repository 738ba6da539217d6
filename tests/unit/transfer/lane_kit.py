"""What the tests of transfer threads share."""

from __future__ import annotations

import threading
from typing import Any, cast

from jdisagg.handoff.messages import ChunkReady
from jdisagg.transfer.base import Piece

NOTHING = Piece(begin=0, end=1, data=cast(Any, None))
READY = ChunkReady(key="k", begin=0, end=1, shape=(1, 1, 1, 1), dtype="float32", num_bytes=4, checksum=0)


def threads_called(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def assert_set(event: threading.Event) -> None:
    assert event.wait(60.0)
