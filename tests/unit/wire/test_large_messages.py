"""What gathers for one message of a Run stream, in either direction, goes in several when it is much."""

from __future__ import annotations

import pytest

from jdisagg.api import channels
from jdisagg.core.requests import Output, SamplingParams
from tests.unit.router.fakes import FakeWorker, expected
from tests.unit.wire.rig import request, run_quiet, until
from tests.unit.wire.router_link import Client

NUM, NUM_TOKENS = 12, 400_000  # more than a megabyte each
LIMIT = "grpc.max_receive_message_length"


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages half as long as everything together are refused."""
    for name in ("_SERVER_OPTIONS", "_CHANNEL_OPTIONS"):
        options = dict(getattr(channels, name)) | {LIMIT: 2 * channels.FULL_MESSAGE_BYTES}
        monkeypatch.setattr(channels, name, tuple(options.items()))


def test_many_long_requests_at_once_do_not_end_the_stream_that_carries_them():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        prompt = tuple(range(100_000, 100_000 + NUM_TOKENS))
        asked = [request(f"r{i}", prompt=(i, *prompt), sampling=SamplingParams(max_tokens=1)) for i in range(NUM)]
        for one in asked:
            client.link.submit(one)
        client.link.cancel("r11", 0)  # it has not been sent yet
        await until(lambda: client.downs or sum(map(len, client.batches)) == NUM - 1)
        assert client.downs == []
        for one in asked[:-1]:
            assert [token for output in client.outputs(one.request_id) for token in output.token_ids] == expected(one)
        assert [one.request_id for one in worker.engine.seen] == [one.request_id for one in asked[:-1]]
        await client.link.close()
        await worker.die()

    run_quiet(body())


def test_many_long_outputs_at_once_do_not_end_the_stream_that_carries_them():
    async def body() -> None:
        worker = await FakeWorker(()).start()
        client = Client(worker.address)
        client.link.submit(request("r", sampling=SamplingParams(max_tokens=1)))
        await until(lambda: client.batches)
        tokens = tuple(range(100_000, 100_000 + NUM_TOKENS))
        for number in range(NUM):
            worker.engine.say(Output(request_id=f"r{number}", token_ids=tokens))
        await until(lambda: client.downs or sum(map(len, client.batches)) == NUM + 1)
        assert client.downs == []
        said = [output for batch in client.batches for output in batch][1:]
        assert [output.request_id for output in said] == [f"r{number}" for number in range(NUM)]
        assert all(output.token_ids == tokens for output in said)
        await client.link.close()
        await worker.die()

    run_quiet(body())
