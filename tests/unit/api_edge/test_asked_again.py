"""Which refusals OpenAI's clients repeat by themselves."""

from __future__ import annotations

import asyncio

import openai
import pytest

from jdisagg.core.errors import (
    DeadlineExceeded,
    Deadly,
    HandoffLost,
    NumericalError,
    Overloaded,
    Quarantined,
    RequestError,
    Unavailable,
)
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving
from tests.unit.api_edge.test_overload import edge_over
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import fleet, stop
from tests.unit.wire.rig import until


@pytest.mark.parametrize(
    ("error", "status", "wanted"),
    [
        (Overloaded("full", retry_after_s=2.0), 429, (None, "2")),
        (Unavailable("it drains"), 503, (None, "1")),
        (HandoffLost("every rung failed"), 502, (None, None)),
        (NumericalError("NaN logits"), 500, (None, None)),
        (DeadlineExceeded("late"), 504, ("false", None)),
        (Deadly("two prefill workers went down with it", num_down=2), 502, ("false", None)),
        (Deadly("the only prefill worker went down with it", num_down=1), 502, (None, None)),
        (Quarantined("in flight when 2 workers went down"), 502, ("false", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_may_end_well_another_time_is_not_kept_from_being_asked_again(
    tokenizer: Tokenizer, error: RequestError, status: int, wanted: tuple[str | None, str | None], stream: bool
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        engine.failure = (0, error)
        async with serving(engine, tokenizer) as served:
            with pytest.raises(openai.APIStatusError) as refused:
                await served.client.completions.create(model="tiny", prompt="the", stream=stream)
            headers = refused.value.response.headers
            assert refused.value.status_code == status
            assert (headers.get("x-should-retry"), headers.get("retry-after")) == wanted

    run(check())


def test_what_was_seen_at_two_deaths_is_sent_once_by_a_client_that_repeats_what_fails(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        for worker in workers:
            worker.engine.frozen = True  # nothing is said before they die
        async with edge_over(router.engine, tokenizer) as (client, _):
            patient = client.with_options(max_retries=2)
            asking = asyncio.create_task(patient.completions.create(model="demo", prompt=[1, 2, 3], max_tokens=4))
            for _ in range(2):
                await until(lambda: any(worker.engine.live for worker in workers))
                victim = next(worker for worker in workers if worker.engine.live)
                workers.remove(victim)
                await victim.die()
            with pytest.raises(openai.InternalServerError, match="2 workers went down") as first:
                await asking
            with pytest.raises(openai.InternalServerError, match="quarantined for") as again:
                await patient.completions.create(model="demo", prompt=[1, 2, 3], max_tokens=4)
        for refused in (first, again):
            assert refused.value.status_code == 502
            assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"
        assert workers[0].engine.seen == []
        await stop(router, *workers)

    run(check())
