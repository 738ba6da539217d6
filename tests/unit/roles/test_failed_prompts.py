"""Prompts that a prefill worker cannot compute: they fail alone."""

from __future__ import annotations

import re

import pytest

from jdisagg.core.errors import NumericalError
from tests.unit.roles.measured import read
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


@pytest.mark.parametrize("bad_slots", [{0}, {1}, {0, 1}])
def test_one_that_waits_for_room_in_the_buffer_does_not_get_what_another_leaves_as_it_fails(bad_slots: set[int]) -> None:
    world = World()
    world.prefill.runner.meanwhile = None
    first_ends_it = (*range(1, 17), 19)
    world.submit(request("a", first_ends_it, 4, ignore_eos=False))
    world.submit(request("b", tuple(range(3, 10)), 4))
    for _ in range(4):  # both are computed in one step, and of "a" so much is published that "b" waits
        world.prefill.runner.device.bad |= bad_slots
        world.prefill.tick(world.now_s)
        world.decode.tick(world.now_s)
    world.prefill.runner.device.bad.clear()
    world.settle()
    failed = {name: isinstance(outputs[-1].error, NumericalError) for name, outputs in world.outputs.items()}
    assert failed == {"a": 0 in bad_slots, "b": 1 in bad_slots}
    assert world.tokens("a") == ([] if 0 in bad_slots else expected(first_ends_it, 4, ignore_eos=False))
    assert world.tokens("b") == ([] if 1 in bad_slots else expected(tuple(range(3, 10)), 4)), "whoever failed before it"


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_nan_counts_and_is_logged_at_the_worker_whose_device_made_it(where: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 8))
    while where == "decode" and not world.outputs["a"]:  # its first token is P's
        world.tick()
    engine = world.prefill if where == "prefill" else world.decode
    engine.runner.device.bad |= set(range(4))
    world.settle()
    assert isinstance(world.outputs["a"][-1].error, NumericalError)
    counts = [read(engine.metrics, "nan_requests_total") for engine in (world.prefill, world.decode)]
    assert counts == ([1, 0] if where == "prefill" else [0, 1])
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    named = r"a#\d+" if where == "prefill" else "a"
    assert re.match(rf"request {named}: step \d+ produced no usable logits", said)
