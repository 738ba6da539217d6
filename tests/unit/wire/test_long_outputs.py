"""Outputs that take long to encode or decode do so beside the event loop, and stay where they are in their request."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from jdisagg.api.in_order import LONG_POSITIONS
from jdisagg.api.peer import codec as peer_codec
from jdisagg.api.peer import reply as stream_reply
from jdisagg.api.worker import client as worker_client
from jdisagg.api.worker import service as worker_service
from jdisagg.core.requests import Output, SamplingParams, TokenLogprob
from jdisagg.handoff.messages import Accepted, Done, Started
from tests.unit.router.fakes import FakeWorker
from tests.unit.wire.peers import CHUNK, H1, H2, Decode, Prefill, opening
from tests.unit.wire.rig import FAST, identity, request, run_quiet, until
from tests.unit.wire.router_link import Client

SCORED = (None, *(TokenLogprob(token, -1.0, ((token, -1.0),)) for token in range(LONG_POSITIONS)))


@pytest.mark.parametrize(("module", "name"), [(worker_service, "encode_output"), (worker_client, "decode_output")])
@pytest.mark.parametrize("num_positions", [LONG_POSITIONS, LONG_POSITIONS + 1])
def test_long_prompt_logprobs_are_converted_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, num_positions: int
) -> None:
    threads: dict[int, threading.Thread] = {}  # by the first token of the output
    convert = getattr(module, name)

    def noted(output: Any) -> Any:
        threads[output.token_ids[0]] = threading.current_thread()
        return convert(output)

    monkeypatch.setattr(module, name, noted)

    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        client.link.submit(request("other", sampling=SamplingParams(max_tokens=1)))
        await until(lambda: client.outputs("other"))
        threads.clear()
        worker.engine.say(Output(request_id="r", token_ids=(1,), prompt_logprobs=SCORED[:num_positions]))
        for request_id, token in (("r", 2), ("r", 3), ("s", 4)):
            if num_positions <= LONG_POSITIONS:  # what is sent at once becomes one output; what waits for a long one does not
                await until(lambda sent=token: len(client.outputs("r")) == sent - 1)
            worker.engine.say(Output(request_id=request_id, token_ids=(token,)))
        await until(lambda: len(client.outputs("r")) == 3 and client.outputs("s"))
        assert [output.token_ids for output in client.outputs("r")] == [(1,), (2,), (3,)]
        assert client.outputs("r")[0].prompt_logprobs == SCORED[:num_positions]
        await client.link.close()
        await worker.die()

    run_quiet(body())
    on_loop = {token for token, thread in threads.items() if thread is threading.main_thread()}
    assert on_loop == ({2, 3, 4} if num_positions > LONG_POSITIONS else {1, 2, 3, 4})


@pytest.mark.parametrize("scored", [None, (*SCORED, SCORED[-1])], ids=["short", "long"])
def test_what_cannot_be_encoded_is_in_the_log_and_ends_its_hand_off_alone(
    scored: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = stream_reply.encode_up

    def broken(message: Any) -> Any:
        if isinstance(message, Done):
            raise ValueError("value out of range")
        return encode(message)

    monkeypatch.setattr(stream_reply, "encode_up", broken)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)
        d.client.open(address, H2, opening())
        await until(lambda: len(p.opened()) == 2)
        first = Output(request_id="r", token_ids=(7,), prompt_logprobs=scored)
        p.opened()[0].reply.send(Done(first=first, num_chunks=0))
        await until(lambda: d.ends(H1))
        p.opened()[1].reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H2) == [Accepted(cached_tokens=0)])
        assert p.ends() == ["dead"]
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    said = [record for record in caplog.records if record.name == stream_reply.__name__]
    assert [(record.getMessage(), record.exc_info is not None) for record in said] == [
        ("a Done cannot be encoded; its hand-off is over", True)
    ]


def test_nothing_is_left_of_a_stream_that_ends_while_long_outputs_are_converted() -> None:
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        client.link.submit(request("other", sampling=SamplingParams(max_tokens=1)))
        await until(lambda: client.outputs("other"))
        for number in range(20):
            worker.engine.say(Output(request_id=f"r{number}", prompt_logprobs=SCORED * 20))
        await until(lambda: client.outputs("r0"))
        await client.link.close()
        worker.engine.say(Output(request_id="late", prompt_logprobs=SCORED * 20))
        await worker.die()
        assert not client.outputs("late")
        assert not client.outputs("r19"), "the stream ended before"

    run_quiet(body())


@pytest.mark.parametrize("name", ["encode_output", "decode_output"])
def test_a_first_token_that_takes_long_to_convert_holds_up_neither_loop_nor_engine_and_nobody_seems_quiet_or_dead(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    threads: list[threading.Thread] = []
    convert = getattr(peer_codec, name)

    def slow(output: Any) -> Any:
        threads.append(threading.current_thread())
        time.sleep(2 * FAST.dead_after_s)
        return convert(output)

    monkeypatch.setattr(peer_codec, name, slow)
    first = Output(request_id="r", token_ids=(7,), prompt_logprobs=(*SCORED, SCORED[-1]))

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)
        reply, done = p.opened()[0].reply, Done(first=first, num_chunks=1)
        for message in (said := [Accepted(cached_tokens=0), Started(), done, CHUNK]):
            reply.send(message)
        await until(lambda: len(d.messages(H1)) == len(said))
        assert d.messages(H1) == said
        assert d.pulse(H1) == []
        assert p.ends() == []
        d.client.close(H1)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    assert threads
    assert threads[0] is not threading.main_thread()
