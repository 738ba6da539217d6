"""READY is read as it was said."""

from __future__ import annotations

import pytest

from jdisagg.serve.ready import Ready, parse

WORKER = Ready(role="decode", http=None, grpc="127.0.0.1:9001", model="demo", warmup_s=0.5, executables=3, bits="ab", pid=7)
CHILD = {"role": "decode", "pid": 7, "grpc": "127.0.0.1:9001"}
FLEET = Ready(role="local", http="127.0.0.1:8000", grpc="127.0.0.1:9000", model="demo", pid=6, workers=(CHILD, CHILD))


@pytest.mark.parametrize("ready", [WORKER, FLEET], ids=lambda ready: ready.role)
def test_what_a_process_says_of_itself_is_what_is_read(ready: Ready) -> None:
    assert parse(ready.line()) == ready


@pytest.mark.parametrize("line", ["", "loading", "[]", '{"event": "other"}'])
def test_another_line_is_none(line: str) -> None:
    assert parse(line) is None
