"""What a router does not take in time becomes fewer outputs that say the same."""

from __future__ import annotations

import asyncio
import random
from time import monotonic

import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.channels import FULL_MESSAGE_BYTES, Credentials
from jdisagg.api.codec import decode_output, encode_output, encode_request
from jdisagg.api.worker import client as worker_client
from jdisagg.api.worker.client import WorkerLink
from jdisagg.api.worker.output_backlog import MOST_TOKENS, OutputBacklog
from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.requests import FinishReason, Output, Provenance, SamplingParams, TokenLogprob
from jdisagg.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.unit.router.fakes import FakeWorker, expected
from tests.unit.wire.rig import FAST, request, run_quiet, until


def output(request_id: str = "r", *token_ids: int, **fields: object) -> common_pb2.Output:
    scored = tuple(TokenLogprob(token_id, -0.5, ((token_id, -0.5), (7, -1.0))) for token_id in token_ids)
    made = Output(request_id=request_id, token_ids=token_ids, logprobs=scored or None, **fields)  # pyright: ignore[reportArgumentType]
    return encode_output(made)


def taken(backlog: OutputBacklog) -> list[Output]:
    return [decode_output(message) for message in backlog.fill()]


def test_a_router_that_keeps_up_gets_each_output_as_it_was_made() -> None:
    backlog = OutputBacklog()
    for token_id in range(5):
        backlog.put([output("a", token_id), output("b", token_id)])
        assert [one.token_ids for one in taken(backlog)] == [(token_id,), (token_id,)]
    assert not backlog


def test_outputs_that_wait_become_one_for_each_request_with_all_that_they_said() -> None:
    first = Provenance(prefill_worker="p", recoveries=("refetch",))
    last = Provenance(prefill_worker="p", recoveries=("refetch", "other_prefill"))
    backlog = OutputBacklog()
    backlog.put(
        [output("a", 1, prompt_logprobs=(None, TokenLogprob(4, -2.0)), provenance=first, cached_tokens=3), output("b", 9)]
    )
    backlog.put([output("a", 2)])
    backlog.put([output("b", 8), output("a", 3, finish=FinishReason.STOP, stop_token_id=3, provenance=last, cached_tokens=3)])
    one, other = taken(backlog)
    assert (one.request_id, one.token_ids, other.request_id, other.token_ids) == ("a", (1, 2, 3), "b", (9, 8))
    assert [scored.token_id for scored in one.logprobs or ()] == [1, 2, 3]
    assert (one.prompt_logprobs, one.provenance, one.cached_tokens) == ((None, TokenLogprob(4, -2.0)), last, 3)
    assert (one.finish, one.stop_token_id, other.finish) == (FinishReason.STOP, 3, None)


def test_nothing_is_added_to_an_end_to_another_attempt_or_to_what_is_long() -> None:
    backlog = OutputBacklog()
    backlog.put([output("a", 1, finish=FinishReason.LENGTH), output("b", *range(MOST_TOKENS)), output("c", 1)])
    backlog.put([output("a", 2), output("b", 5), output("c", 2, attempt=1)])
    backlog.put([output("b", 6)])
    assert [(one.request_id, one.attempt, len(one.token_ids)) for one in taken(backlog)] == [
        ("a", 0, 1),
        ("b", 0, MOST_TOKENS),
        ("c", 0, 1),
        ("a", 0, 1),
        ("b", 0, 2),
        ("c", 1, 1),
    ]


def test_an_error_takes_no_tokens_with_it() -> None:
    """Who reads an output with an error looks at nothing else of it."""
    backlog = OutputBacklog()
    backlog.put([output("a", 1)])
    backlog.put([output("a", 2)])
    backlog.put([output("a", finish=FinishReason.ERROR, error=DeadlineExceeded("too late"))])
    one, end = taken(backlog)
    assert (one.token_ids, one.error, one.finish) == ((1, 2), None, None)
    assert (end.token_ids, type(end.error), end.finish) == ((), DeadlineExceeded, FinishReason.ERROR)


def test_whenever_messages_are_taken_every_request_gets_its_tokens_in_order() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        backlog, got, made = OutputBacklog(), dict[str, list[int]](), dict[str, list[int]]()
        for token_id in range(60):
            names = draw.sample("abcd", draw.randint(0, 4))
            backlog.put([output(name, token_id) for name in names])
            for name in names:
                made.setdefault(name, []).append(token_id)
            for one in taken(backlog) if draw.random() < 0.2 else ():
                got.setdefault(one.request_id, []).extend(one.token_ids)
        for one in taken(backlog):
            got.setdefault(one.request_id, []).extend(one.token_ids)
        assert got == made


def test_what_fits_no_message_goes_on_in_the_next_one_in_order() -> None:
    backlog = OutputBacklog()
    long = tuple(TokenLogprob(9, -1.0, ((9, -1.0),) * 20) for _ in range(23_000))
    backlog.put([output("a", 1, prompt_logprobs=(None, *long))])
    backlog.put([output("b", 1)])
    assert backlog.fill()[0].ByteSize() > FULL_MESSAGE_BYTES
    backlog.put([output("b", 2)])
    assert [one.token_ids for one in taken(backlog)] == [(1, 2)]


def test_a_router_that_reads_late_gets_all_tokens_in_fewer_outputs_and_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        worker = await FakeWorker(()).start()
        asked = [request(f"r{i}", prompt=(i, 1), sampling=SamplingParams(max_tokens=300)) for i in range(60)]
        async with channels.open_channel(worker.address, reads_ahead=False) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
            submits = [worker_pb2.Submit(request=encode_request(one, monotonic())) for one in asked]
            await call.write(worker_pb2.RunRequest(submits=submits, heartbeat=worker_pb2.Heartbeat()))

            async def beat() -> None:
                while True:
                    await asyncio.sleep(0.05)
                    await call.write(worker_pb2.RunRequest(heartbeat=worker_pb2.Heartbeat()))

            beating = asyncio.create_task(beat())
            await until(lambda: len(worker.engine.live) == len(asked))
            await until(lambda: not worker.engine.live)  # 18,000 tokens, and nothing is read
            await worker.service.until_taken(monotonic() + 0.2)
            assert "routers that have not taken all outputs by the end of --drain-s: 1" in caplog.text
            waiting = asyncio.create_task(worker.service.until_taken(monotonic() + 60.0))
            outputs, ends = list[Output](), 0
            async for message in call:
                outputs += map(decode_output, message.outputs)
                ends += sum(bool(one.finish) for one in message.outputs)
                if ends == len(asked):
                    break
            await waiting  # for no longer than that
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            call.cancel()
        for one in asked:
            mine = [o for o in outputs if o.request_id == one.request_id]
            assert [token for o in mine for token in o.token_ids] == expected(one)
        assert len(outputs) < 60 * 300 / 2
        await until(lambda: worker.service.num_streams == 0)
        await worker.die()

    run_quiet(body())


def test_a_routers_link_does_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's window would grow with what a quick router reads, and hold seconds of tokens once it is slow."""
    opened = list[bool]()
    open_channel = channels.open_channel

    def noted(address: str, *credentials: Credentials, reads_ahead: bool = True) -> grpc.aio.Channel:
        opened.append(reads_ahead)
        return open_channel(address, *credentials, reads_ahead=reads_ahead)

    monkeypatch.setattr(worker_client, "open_channel", noted)

    async def body() -> None:
        worker, ups = await FakeWorker(()).start(), list[bool]()
        link = WorkerLink(
            worker.address,
            config=FAST,
            on_outputs=lambda outputs: None,
            on_up=lambda: ups.append(True),
            on_down=lambda reason: None,
            on_load=lambda load, num_cancelled: None,
            on_quiet=lambda is_quiet: None,
            waits=lambda silent_s: False,
        )
        await until(lambda: ups)
        assert opened == [False]
        await link.close()
        await worker.die()

    run_quiet(body())
