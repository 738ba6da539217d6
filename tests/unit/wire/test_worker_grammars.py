"""Submits that have a grammar, at a worker: its engine takes no time for it, and nobody waits for another one's."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from time import monotonic
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.codec import encode_request
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.generation.token_engine import ModelCard
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.errors import InvalidRequest, Overloaded, RequestError
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Grammar, GrammarKind, Output, SamplingParams
from jdisagg.text.grammar import Compiled, Grammars
from jdisagg.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.unit.router.fakes import FakeWorker
from tests.unit.text.grammar_rig import demo_vocabulary, failing, is_there
from tests.unit.wire.rig import FAST, request, run_quiet, until

SLOW, NONE = Grammar(GrammarKind.REGEX, "slow"), Grammar(GrammarKind.REGEX, "(")


class Panic(BaseException):
    """As a panic of the library is."""


class SlowGrammars(Grammars):
    """Those called slow are compiled when the test says so."""

    def __init__(self) -> None:
        super().__init__(demo_vocabulary())
        self.go = asyncio.Event()
        self.under_way = 0

    async def ahead(self, grammar: Grammar) -> Compiled:
        self.under_way += 1
        try:
            if grammar == SLOW:
                await self.go.wait()
            return await super().ahead(grammar)
        finally:
            self.under_way -= 1


class Worker(FakeWorker):
    """With the real service, and grammars."""

    def __init__(self, grammars: Grammars | None) -> None:
        super().__init__(())
        self.service = WorkerService(self.engine, FAST, grammars)
        self.cancelled: list[tuple[str, int]] = []
        cancel = self.engine.cancel

        def noted(request_id: str, attempt: int, sink: Callable[[list[Output]], None], *, enough: bool = False) -> None:
            self.cancelled.append((request_id, attempt))
            cancel(request_id, attempt, sink, enough=enough)

        self.engine.cancel = noted

    def seen(self) -> list[tuple[str, int]]:
        return [(request.request_id, request.attempt) for request in self.engine.seen]


def asked(request_id: str, grammar: Grammar | None, attempt: int = 0, max_tokens: int = 10_000) -> EngineRequest:
    return request(request_id, sampling=SamplingParams(max_tokens=max_tokens, grammar=grammar), attempt=attempt)


def submits(*requests: EngineRequest) -> worker_pb2.RunRequest:
    wire = [worker_pb2.Submit(request=encode_request(one, monotonic())) for one in requests]
    return worker_pb2.RunRequest(submits=wire)


def cancels(request_id: str, attempt: int = 0) -> worker_pb2.RunRequest:
    return worker_pb2.RunRequest(cancels=[worker_pb2.Cancel(request_id=request_id, attempt=attempt)])


def run(body: Callable[[Worker, SlowGrammars, grpc.aio.StreamStreamCall], Awaitable[None]]) -> None:
    """`body` with one worker and one stream of a router."""

    async def whole() -> None:
        grammars = SlowGrammars()
        worker = Worker(grammars)
        await worker.start()
        channel = channels.open_channel(worker.address)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        await body(worker, grammars, call)
        call.cancel()
        await until(lambda: worker.service.num_streams == 0)
        await until(lambda: grammars.under_way == 0)
        assert not worker.engine.live
        await channel.close()
        await worker.die()

    run_quiet(whole())


def test_a_grammar_that_is_being_compiled_holds_up_nobody_behind_it() -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        fast = Grammar(GrammarKind.REGEX, "fast")
        await call.write(submits(asked("slow", SLOW), asked("plain", None), asked("fast", fast)))
        await until(lambda: len(worker.engine.seen) == 2)
        assert sorted(worker.seen()) == [("fast", 0), ("plain", 0)]
        await call.write(cancels("plain"))
        await until(lambda: "plain" not in worker.engine.live)
        assert "slow" not in worker.engine.live
        grammars.go.set()
        await until(lambda: "slow" in worker.engine.live)
        assert is_there(grammars, SLOW), "it takes the engine no time"
        assert is_there(grammars, fast)
        await call.write(submits(asked("again", SLOW)))
        await until(lambda: "again" in worker.engine.live)
        assert {request.sampling.grammar for request in worker.engine.seen} == {SLOW, fast, None}

    run(body)


def test_a_bug_that_a_grammar_meets_ends_its_request_and_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        async def fail(grammar: Grammar) -> Compiled:
            raise ZeroDivisionError("a bug of ours")

        grammars.ahead = fail  # type: ignore[method-assign]
        await call.write(submits(asked("r", SLOW)))
        outputs = []
        while not outputs:
            outputs = (await call.read()).outputs
        assert (outputs[0].request_id, outputs[0].finish) == ("r", common_pb2.FINISH_REASON_ERROR)
        assert worker.seen() == []

    run(body)
    assert "a bug of ours" in caplog.text


@pytest.mark.parametrize("end", ["cancel", "stream"])
def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_is_none_that_the_engine_hears_of(end: str) -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        await call.write(submits(asked("slow", SLOW), asked("kept", SLOW)))
        await until(lambda: grammars.under_way == 2)
        if end == "stream":
            call.cancel()
            await until(lambda: worker.service.num_streams == 0)
        else:
            await call.write(cancels("slow", attempt=1))  # another one
            await call.write(cancels("slow"))
            await until(lambda: ("slow", 0) in worker.cancelled)
        await until(lambda: grammars.under_way == (0 if end == "stream" else 1))
        grammars.go.set()
        await until(lambda: end == "stream" or worker.engine.live)
        await asyncio.sleep(0.1)
        assert worker.seen() == ([] if end == "stream" else [("kept", 0)])

    run(body)


def test_a_cancel_that_comes_when_it_is_just_compiled_leaves_nothing_running() -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        for number in range(20):
            name, grammar = f"r{number}", Grammar(GrammarKind.REGEX, f"r{number}")
            await call.write(submits(asked(name, grammar)))
            await asyncio.sleep(0.0003 * number)
            await call.write(cancels(name))
        await until(lambda: len(worker.cancelled) == 20)
        await until(lambda: grammars.under_way == 0)
        await asyncio.sleep(0.05)
        assert not worker.engine.live

    run(body)


def test_the_next_attempt_of_one_that_was_cancelled_is_submitted_once() -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        for attempt in range(2):
            await call.write(submits(asked("r", SLOW, attempt)))
            await call.write(cancels("r", attempt))
        await call.write(submits(asked("r", SLOW, attempt=2)))
        await until(lambda: len(worker.cancelled) == 2 and grammars.under_way == 1)
        grammars.go.set()
        await until(lambda: worker.engine.live)
        assert worker.seen() == [("r", 2)]

    run(body)


async def output_of(call: grpc.aio.StreamStreamCall, request_id: str) -> common_pb2.Output:
    """The next one of that request."""
    while True:
        answer = await call.read()
        for output in answer.outputs:
            if output.request_id == request_id:
                return output


def test_a_grammar_that_is_none_fails_its_request_alone() -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        await call.write(submits(asked("none", NONE), asked("fine", None)))
        output = await output_of(call, "none")
        assert "unclosed group" in output.error.message
        assert (output.error.code, output.error.field) == (3, "grammar")
        await until(lambda: "fine" in worker.engine.live)
        assert worker.seen() == [("fine", 0)]

    run(body)


@pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("odd"), Panic("index out of bounds")], ids=repr)
def test_whatever_is_in_the_way_of_compiling_a_grammar_fails_its_request_alone_and_at_once(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        failing(monkeypatch, grammars, "broken", error)
        await call.write(submits(asked("r", Grammar(GrammarKind.REGEX, "broken")), asked("fine", SLOW)))
        output = await output_of(call, "r")
        assert output.error.message == f"grammar (regex): could not be compiled: {error!r}"
        assert output.error.code == 13
        assert "a grammar (regex, 6 characters) could not be compiled" in caplog.text
        grammars.go.set()
        await until(lambda: "fine" in worker.engine.live)
        assert worker.seen() == [("fine", 0)]

    run(body)


def test_a_grammar_is_held_as_long_as_its_request_is_here_and_no_longer() -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        grammars._most_kept = 0
        worker.engine.frozen = True  # the first one does not end before the last one is there
        names = ("ended", "cancelled", "left")
        for name in names:
            await call.write(
                submits(asked(name, Grammar(GrammarKind.REGEX, name), max_tokens=50 if name == "ended" else 10_000))
            )
        await until(lambda: len(worker.seen()) == len(names))
        assert held(grammars, *names) == {*names}
        worker.engine.frozen = False
        await until(lambda: held(grammars, *names) == {"cancelled", "left"})
        await call.write(cancels("cancelled"))
        await until(lambda: held(grammars, *names) == {"left"})
        call.cancel()
        await until(lambda: held(grammars, *names) == set())

    run(body)


def held(grammars: Grammars, *names: str) -> set[str]:
    return {name for name in names if is_there(grammars, Grammar(GrammarKind.REGEX, name))}


def test_a_request_of_the_workers_own_edge_holds_its_grammar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole() -> None:
        posted: list[object] = []
        grammars = Grammars(demo_vocabulary(), most_kept=0)
        metrics = Metrics()
        thread: Any = SimpleNamespace(loop=SimpleNamespace(inbox=SimpleNamespace(post=posted.append), metrics=metrics))
        card = ModelCard(name="tiny", max_model_len=48, vocab_size=64, eos_token_ids=(), fingerprint="weights-1")
        engine = LocalEngine(thread, card, not_ready_reason=lambda: "", grammars=grammars)
        answer = asyncio.create_task(anext(engine.generate(asked("r", Grammar(GrammarKind.REGEX, "r")))))
        await until(lambda: posted)
        assert held(grammars, "r") == {"r"}
        answer.cancel()
        await asyncio.wait({answer})
        del answer  # with the traceback of its end
        gc.collect()
        assert held(grammars, "r") == set()
        failing(monkeypatch, grammars, "broken", MemoryError("full"))
        posted.clear()
        with pytest.raises(RequestError, match="could not be compiled: MemoryError"):
            await anext(engine.generate(asked("r", Grammar(GrammarKind.REGEX, "broken"))))
        monkeypatch.setattr("jdisagg.text.grammar.MOST_TEXT", 0)
        with pytest.raises(Overloaded):
            await anext(engine.generate(asked("r", Grammar(GrammarKind.REGEX, "more"))))
        assert posted == []
        counts = {reason: metrics.requests.finished.labels(reason=reason)._value.get() for reason in ("error", "overloaded")}
        assert counts == {"error": 1, "overloaded": 1}, "the engine, which counts others, has not heard of them"

    run_quiet(whole())


def test_a_grammar_of_an_unknown_kind_is_refused_alone() -> None:
    async def body(worker: Worker, grammars: SlowGrammars, call: grpc.aio.StreamStreamCall) -> None:
        message = submits(asked("before", None), asked("odd", SLOW), asked("behind", None))
        message.submits[1].request.sampling.grammar.kind = 17  # pyright: ignore[reportAttributeAccessIssue]
        await call.write(message)
        refused: list[worker_pb2.RunResponse] = []
        while not refused:
            answer = await call.read()
            refused += [answer] if any(output.request_id == "odd" for output in answer.outputs) else []
        (output,) = [output for output in refused[0].outputs if output.request_id == "odd"]
        assert output.error.message.startswith("grammar.kind: wanted one of GRAMMAR_KIND_JSON_SCHEMA, ")
        assert output.error.message.endswith(", got 17")
        await until(lambda: len(worker.engine.live) == 2)
        assert worker.seen() == [("before", 0), ("behind", 0)]

    run(body)


def test_a_worker_without_grammars_leaves_the_answer_to_its_engine() -> None:
    async def whole() -> None:
        worker = Worker(None)
        await worker.start()
        worker.engine.refuse = InvalidRequest("none here")
        channel = channels.open_channel(worker.address)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        await call.write(submits(asked("r", SLOW)))
        await until(worker.seen)
        assert worker.seen() == [("r", 0)]
        call.cancel()
        await channel.close()
        await worker.die()

    run_quiet(whole())
