"""GenerationService on a real channel."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jdisagg.api import late_request, unread
from jdisagg.api.generation.service import read_generate
from jdisagg.core.errors import HandoffLost, Overloaded
from jdisagg.core.requests import EngineRequest, SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import PROVENANCE, FakeEngine, Served, living, run, serving
from tests.unit.reading import read_on
from tests.unit.wire.raw_http2 import HEADERS, RawCall
from tests.unit.wire.rig import until

ANSWER = "the quick brown fox 😀 jumps"


async def _collect(
    served: Served, heard: list[generation_pb2.GenerateResponse] | None = None, **fields: Any
) -> tuple[list[generation_pb2.Delta], generation_pb2.Complete]:
    """Deltas and the one complete, which is last. Into `heard` as they come."""
    messages = [] if heard is None else heard
    async for message in served.stub.Generate(generation_pb2.GenerateRequest(**fields)):
        messages.append(message)
    assert [message.WhichOneof("event") for message in messages[:-1]] == ["delta"] * (len(messages) - 1)
    assert messages[-1].WhichOneof("event") == "complete"
    assert len({message.request_id for message in messages}) == 1
    return [message.delta for message in messages[:-1]], messages[-1].complete


def test_a_client_that_reads_nothing_is_not_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 0.5)

    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER * 10_000, max_model_len=200_000)  # dozens of MB: more than a connection holds
        engine.tokens_per_output = 500
        async with serving(engine, tokenizer) as served:
            sampling = common_pb2.SamplingParams(max_tokens=50_000, logprobs=20)
            call = served.stub.Generate(generation_pb2.GenerateRequest(request_id="mine", text="the", sampling=sampling))
            assert (await call.read()).delta.text
            await served.wait_idle()

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_on(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert caught.value.details() == "request mine: nothing of its answer was taken for 0.5 s; read sooner"
            assert served.ends() == {}, "what became of it only its engine counts"

    run(check())


def test_a_client_that_does_not_even_read_the_first_message_is_told_so(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 0.3)

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            sampling = common_pb2.SamplingParams(max_tokens=4)
            asked = generation_pb2.GenerateRequest(text="the", sampling=sampling).SerializeToString()
            call = await RawCall.begin(served.grpc_address, "/jdisagg.v1.GenerationService/Generate", asked, window=4)
            async with asyncio.timeout(20):
                await call.until(HEADERS)
                await asyncio.sleep(0.6)
                call.allow(2**20)
                await call.until(HEADERS, ends=True)
            call.close()
            await served.wait_idle()

    run(check())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_refused_call_leaves_nothing_to_the_garbage_collector(tokenizer: Tokenizer) -> None:
    """It searches all of a router's objects once in tens of thousands of refusals: a storm of retries would fill its memory."""

    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        async with serving(engine, tokenizer) as served:
            gc.collect()
            gc.disable()
            earlier = living(EngineRequest, grpc.aio.AbortError)  # what tests before this one hold
            try:
                engine.refusal = Overloaded("full")
                for _ in range(5):
                    with pytest.raises(grpc.aio.AioRpcError, match="full"):
                        await _collect(served, text="the quick")
                engine.refusal = None
                await until(
                    lambda: len(living(EngineRequest, grpc.aio.AbortError)) <= len(earlier)
                )  # the last call may still run
            finally:
                gc.enable()

    run(check())


def test_a_call_that_is_left_leaves_nothing_to_the_garbage_collector(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER * 100)
        engine.delay_s = 0.05
        async with serving(engine, tokenizer) as served:
            gc.collect()
            gc.disable()
            earlier = living(EngineRequest)
            try:
                for _ in range(3):
                    sampling = common_pb2.SamplingParams(max_tokens=100)
                    call = served.stub.Generate(generation_pb2.GenerateRequest(text="the", sampling=sampling, n=2))
                    await call.read()
                    call.cancel()
                    del call
                await served.wait_idle()
                engine.requests.clear()
                await until(lambda: len(living(EngineRequest)) <= len(earlier))
            finally:
                gc.enable()

    run(check())


@pytest.mark.parametrize(
    ("slowest", "ours_s", "kept"), [(2**30, 0.0, False), (2**13, 0.0, True), (2**30, 10.0, True)], ids=["slow", "fair", "busy"]
)
def test_a_client_that_takes_a_message_now_and_then_is_not_kept_for_as_long_as_its_answer_lasts(
    slowest: int, ours_s: float, kept: bool
) -> None:
    """It is what waits for it that counts, and not what takes this process a moment. The clock goes on while it waits alone."""
    taken: list[Message] = []
    now_s = [100.0]

    async def write(message: Message) -> None:
        for _ in range(5):
            await asyncio.sleep(0.0)
        now_s[0] += 0.05
        taken.append(message)

    async def check() -> None:
        slow = unread.Reader(cast(grpc.aio.ServicerContext, SimpleNamespace(write=write)))
        message = generation_pb2.GenerateResponse(request_id="r" * 1000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slow, "_left_s", 0.5)
            patch.setattr(unread, "SLOWEST_IN_ALL_BYTES_PER_S", slowest)
            patch.setattr(unread, "OURS_S", ours_s)
            patch.setattr(unread, "monotonic", lambda: now_s[0])
            while len(taken) < 30 and await slow.takes(message):
                now_s[0] += 0.02  # the model is not done with the next
            assert (len(taken) == 30) is kept, len(taken)

    run(check())


def test_a_call_that_brings_no_request_ends(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "REQUEST_TIMEOUT_S", 0.3)

    async def check() -> None:
        async with (
            serving(FakeEngine(tokenizer, "fox"), tokenizer) as served,
            grpc.aio.insecure_channel(served.grpc_address) as channel,
        ):
            kinds = {"Generate": channel.stream_stream, "Abort": channel.stream_unary, "GetModel": channel.stream_unary}
            for name, kind in kinds.items():
                for ends, code in ((False, grpc.StatusCode.DEADLINE_EXCEEDED), (True, grpc.StatusCode.INVALID_ARGUMENT)):
                    call = kind(f"/jdisagg.v1.GenerationService/{name}")()
                    if ends:
                        await call.done_writing()
                    async with asyncio.timeout(20.0):
                        assert await call.code() is code

    run(check())


def test_deltas_join_to_the_complete_result(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER, "hello world"), tokenizer) as served:
            sampling = common_pb2.SamplingParams(max_tokens=100, logprobs=1, prompt_logprobs=1, seed=9, temperature=0)
            deltas, complete = await _collect(served, text="the dog", n=2, sampling=sampling)
            for choice, text in zip(complete.choices, (ANSWER, "hello world"), strict=True):
                mine = [delta for delta in deltas if delta.index == choice.index]
                assert "".join(delta.text for delta in mine) == choice.text == text
                assert [token for delta in mine for token in delta.token_ids] == list(choice.token_ids)
                assert sum(len(delta.logprobs) for delta in mine) == len(choice.token_ids)
                prompt = [entry for delta in mine for entry in delta.prompt_logprobs]
                assert [entry.token_id for entry in prompt] == list(tokenizer.encode("the dog"))
                assert [entry.absent for entry in prompt] == [True] + [False] * (len(prompt) - 1)
                assert [delta.finish for delta in mine if delta.finish] == [common_pb2.FINISH_REASON_STOP]
                assert choice.provenance.prefill_worker == PROVENANCE.prefill_worker
            assert complete.usage.prompt_tokens == len(tokenizer.encode("the dog"))
            assert complete.usage.completion_tokens == sum(len(choice.token_ids) for choice in complete.choices)
            assert complete.usage.cached_tokens == 2
            assert {request.sampling.seed for request in served.engine.requests} == {9}
            assert {request.sampling.temperature for request in served.engine.requests} == {0}

    run(check())


def test_token_ids_and_stop_strings(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            ids = generation_pb2.TokenIds(ids=[5, 6])
            sampling = common_pb2.SamplingParams(max_tokens=50)
            _, complete = await _collect(served, token_ids=ids, stop=["own"], sampling=sampling)
            assert complete.choices[0].text == "the quick br"
            assert complete.choices[0].stop == "own"
            assert served.engine.requests[0].prompt_token_ids == (5, 6)
            assert len(served.engine.cancelled) == 1

    run(check())


@pytest.mark.parametrize(("asked", "wanted"), [({}, 20), ({"top_k": 5}, 5), ({"top_k": 0}, None), ({"top_k": -1}, None)])
def test_a_recommended_top_k_can_be_switched_off(asked: dict[str, int], wanted: int | None) -> None:
    request = generation_pb2.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(**asked))
    assert read_generate(request, SamplingParams(top_k=20), 9.0).sampling.top_k == wanted


def test_abort_finishes_with_what_there_is(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = 0.02
        async with serving(engine, tokenizer) as served:
            await served.stub.Abort(generation_pb2.AbortRequest(request_id="unknown"))
            heard: list[generation_pb2.GenerateResponse] = []
            work = asyncio.create_task(_collect(served, heard, request_id="mine", text="the", n=2))
            while {message.delta.index for message in heard if message.delta.token_ids} != {0, 1}:
                await asyncio.sleep(0.005)
            engine.delay_s = 60.0  # nothing ends by itself
            twin = served.stub.Generate(generation_pb2.GenerateRequest(request_id="mine", text="the"))
            with pytest.raises(grpc.aio.AioRpcError, match="still running"):
                await twin.read()
            await served.stub.Abort(generation_pb2.AbortRequest(request_id="mine"))
            _, complete = await work
            assert [choice.finish for choice in complete.choices] == [common_pb2.FINISH_REASON_ABORT] * 2
            assert all(choice.token_ids for choice in complete.choices)
            assert sorted(engine.cancelled) == ["mine/0", "mine/1"]

    run(check())


def test_a_cancelled_call_frees_everything(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = 60.0
        async with serving(engine, tokenizer) as served:
            call = served.stub.Generate(generation_pb2.GenerateRequest(text="the", n=4))
            reading = asyncio.create_task(call.read())
            while len(engine.live) < 4:
                await asyncio.sleep(0.005)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await served.wait_idle()
            assert len(engine.cancelled) == 4

    run(check())


@pytest.mark.parametrize(
    ("fields", "violation"),
    [
        ({"text": "x", "sampling": common_pb2.SamplingParams(top_p=2)}, "sampling.top_p"),
        ({"text": "x", "sampling": common_pb2.SamplingParams(max_tokens=-1)}, "sampling.max_tokens"),
        ({"text": "x", "sampling": common_pb2.SamplingParams(top_k=-2)}, "sampling.top_k"),
        ({"token_ids": generation_pb2.TokenIds(ids=[99_999])}, "token_ids"),
        ({"token_ids": generation_pb2.TokenIds()}, "token_ids"),
        ({"text": "x", "n": 65}, "n"),
        ({}, "prompt"),
    ],
)
def test_bad_fields_are_violations(tokenizer: Tokenizer, fields: dict[str, Any], violation: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            call = served.stub.Generate(generation_pb2.GenerateRequest(**fields))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            status = await rpc_status.aio.from_call(call)
            assert status is not None
            detail = error_details_pb2.BadRequest()
            assert status.details[0].Unpack(detail)
            assert [entry.field for entry in detail.field_violations] == [violation]

    run(check())


@pytest.mark.parametrize("character", ["x", "\u4e16", "\U0001f600"])
def test_an_error_that_repeats_what_the_client_sent_keeps_its_status(tokenizer: Tokenizer, character: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _collect(served, model=100_000 * character, text="the")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert 500 < len((caught.value.details() or "").encode()) < 1100

    run(check())


def test_overload_and_loss_have_their_status(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        async with serving(engine, tokenizer) as served:
            engine.refusal = Overloaded("full", retry_after_s=1.5)
            call = served.stub.Generate(generation_pb2.GenerateRequest(text="x"))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            status = await rpc_status.aio.from_call(call)
            detail = error_details_pb2.RetryInfo()
            assert status is not None
            assert status.details[0].Unpack(detail)
            assert detail.retry_delay.ToMilliseconds() == 1500
            engine.refusal, engine.failure = None, (2, HandoffLost("every rung failed"))
            call = served.stub.Generate(generation_pb2.GenerateRequest(text="x"))
            messages = []
            with pytest.raises(grpc.aio.AioRpcError, match="every rung failed"):
                messages += [message async for message in call]
            assert await call.code() == grpc.StatusCode.ABORTED

    run(check())


def test_a_deadline_of_the_client_reaches_the_engine(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = 60.0
        async with serving(engine, tokenizer) as served:
            number = 0
            while not engine.requests:  # a machine that stands still may let one end before it is there
                number += 1
                call = served.stub.Generate(generation_pb2.GenerateRequest(text="x"), timeout=0.3 * number)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await served.wait_idle()
            assert len(engine.cancelled) == len(engine.requests)

    run(check())


def test_the_model_is_described(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            model = await served.stub.GetModel(generation_pb2.GetModelRequest())
            assert (model.model, model.max_model_len, list(model.eos_token_ids)) == ("tiny", 200, [1])
            assert model.has_chat_template
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.stub.GetModel(generation_pb2.GetModelRequest(model="other"))
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND

    run(check())
