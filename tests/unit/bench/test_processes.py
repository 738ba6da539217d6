"""Processes beside a bench that do not answer: the bench ends with words that name them."""

from __future__ import annotations

import io
import multiprocessing
import urllib.request

import pytest
from bench_kit import servers
from bench_kit.child import Child
from bench_kit.servers import Server

from jdisagg.serve.ready import Ready


def test_a_process_that_has_ended_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    ended = Child(7, ours)
    for ask in (lambda: ended.answer(1.0), lambda: ended.ask("how"), lambda: ended.tell("this")):
        with pytest.raises(RuntimeError, match="process 7 has ended"):
            ask()


def test_an_engine_that_never_answers_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ANSWER_S", 0.1)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b'{"error": "it has not answered"}'))
    server = Server(process=None, ready=Ready(role="decode", http="x", grpc=None, model=""), client=None)
    with pytest.raises(RuntimeError, match="it has not answered"):
        server.handoffs()
