"""Which workers a router takes: one tokenizer, one chat template and one model's name for all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jdisagg.core.errors import Unavailable, Unfit
from jdisagg.core.requests import Role
from jdisagg.router.entrance import LATELY_S, Entrance
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.wire.rig import member, run_quiet, until

HERE = member(worker="pid 1", name="a")
TEXT = "0" * 64


@pytest.mark.parametrize(
    ("entrance", "changes", "why"),
    [
        ((TEXT, None), {"text_digest": "1" * 64}, "tokenizer or chat template of its model 'a' are not those"),
        (("", None), {"name": "b"}, "it serves 'b', pid 1 'a': give all processes of one model the same --served-model-name"),
        (("", "a"), {"name": "b"}, "it serves 'b', the router 'a': give"),
        (("", "b"), {}, "it serves 'a', the router 'b': give"),
        ((TEXT, "a"), {"text_digest": TEXT}, ""),
        ((TEXT, None), {"text_digest": ""}, ""),  # too old to say, or without a tokenizer
        (("", None), {"text_digest": TEXT}, ""),
        ((TEXT, "b"), {"text_digest": "1" * 64, "role": Role.PREFILL}, ""),  # gets tokens, of its decode workers
    ],
)
def test_a_worker_joins_when_its_text_and_name_are_those_of_the_router(
    entrance: tuple[str, str | None], changes: dict[str, Any], why: str
) -> None:
    asked, door = member(HERE, address="h:2", worker="pid 2", **changes), Entrance(*entrance)
    if not why:
        door.check(asked, [HERE], 1.0)
        assert not door.lately(1.0)
        return
    with pytest.raises(Unfit, match=why):
        door.check(asked, [HERE], 1.0)
    assert door.lately(1.0 + LATELY_S / 2).startswith(f"pid 2 may not join: {why}")
    assert not door.lately(1.0 + LATELY_S)


def test_a_name_is_that_of_the_workers_that_decode_and_free_when_they_are_gone() -> None:
    door, other = Entrance(), member(HERE, name="b", worker="pid 2")
    door.check(other, [member(HERE, role=Role.PREFILL)], 0.0)
    with pytest.raises(Unfit):
        door.check(other, [HERE], 0.0)
    door.check(other, [], 0.0)
    assert not door.lately(0.0)


def test_a_worker_of_another_model_gets_nothing_and_both_sides_say_why(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router(entrance=Entrance(TEXT)).start()
        other = await FakeWorker((router.address,), text_digest="1" * 64).start()
        await until(lambda: "may not join" in router.engine.health().reason)
        reason = router.engine.health().reason
        assert reason.startswith("no decode or unified worker is connected; fake @ ")
        with pytest.raises(Unavailable, match=r"no worker that decodes has registered .*; fake @ .* may not join: tokenizer"):
            _ = router.engine.card
        await asyncio.sleep(0.6)  # it comes back several times
        one = await FakeWorker((router.address,), text_digest=TEXT).start()
        await until(lambda: router.linked() == 1)
        assert [member.address for member in router.engine.workers.members()] == [one.address]
        for worker in (one, other):
            await worker.die()
        await router.stop()

    run_quiet(body())
    ours = [record for record in caplog.records if record.name.startswith("jdisagg")]
    said = [record.getMessage() for record in ours if record.levelname == "ERROR"]
    assert len(said) == 2, said
    assert "may not join: tokenizer or chat template of its model 'demo' are not those that this router has read" in said[0]
    assert "does not take this worker: tokenizer or chat template" in said[1]
