"""The choices of one prompt come to a worker one by one, each with a copy of it: one is kept."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.api.worker.service import MOST_PROMPTS
from jdisagg.core.requests import EngineRequest
from tests.unit.router.fakes import FakeWorker
from tests.unit.wire.rig import request, run_quiet, until
from tests.unit.wire.router_link import Client

PROMPT = tuple(range(1000, 1040))


def choice(name: str, group: str, prompt: tuple[int, ...] = PROMPT) -> EngineRequest:
    return replace(request(name), prompt_token_ids=prompt, fork_group=group)


def test_choices_of_one_prompt_share_it_and_nobody_else_does() -> None:
    asked = [
        choice("a", "one"),
        choice("b", "one"),
        choice("c", "one"),
        choice("other", "one", PROMPT[1:]),  # a client's own choice of a name
        choice("d", "two"),
        choice("alone", ""),
        choice("e", "two"),
        *(choice(f"others {number}", f"{number}") for number in range(MOST_PROMPTS)),
        choice("late", "two"),
    ]

    got: list[EngineRequest] = []

    async def body() -> None:
        worker = await FakeWorker(()).start()
        worker.engine.submit = lambda request, sink, front_end: got.append(request)
        client = Client(worker.address)
        for one in asked:
            client.link.submit(one)
        await until(lambda: len(got) == len(asked))
        await worker.die()

    run_quiet(body())
    assert [(one.request_id, one.prompt_token_ids) for one in got] == [(one.request_id, one.prompt_token_ids) for one in asked]
    place = {one.request_id: id(one.prompt_token_ids) for one in got}
    assert place["a"] == place["b"] == place["c"]
    assert place["d"] == place["e"]
    assert len(set(place.values())) == len(asked) - 3, "nobody else's, and not for ever"
