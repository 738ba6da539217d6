"""A prefill and a decode engine together: exact streams, one end each, nothing left, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis.stateful import run_state_machine_as_test

from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff.messages import Accepted, HandoffId, PrefillToDecode
from jdisagg.roles.inbox import Submit
from tests.unit.roles.pair_rules import PairMachine
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


@pytest.mark.covers("D14")
def test_stream_is_exact_and_everything_is_freed() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.outputs["a"][-1].finish is FinishReason.LENGTH
    assert world.decode.scheduler.stats.prefill_tokens == 0


@pytest.mark.covers("D02")
def test_the_peer_is_asked_at_once_and_no_page_is_taken_before_it_has_begun() -> None:
    world = World(local_prefill=False)
    scheduler = world.decode.scheduler
    world.submit(request("a", PROMPT, 6))
    for _ in range(5):  # P stands still
        world.decode.tick(world.now_s)
        world.network.step()
    assert len(world.wire.open_streams) == 1
    assert scheduler.counts()["prealloc"] == 1
    assert scheduler.num_free_pages == scheduler.num_pages
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)


def test_last_output_says_where_the_prompt_was_computed() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    provenance = world.outputs["a"][-1].provenance
    assert provenance is not None
    assert (provenance.prefill_worker, provenance.decode_worker) == ("p0", "decode")
    assert (provenance.transferred_tokens, provenance.transferred_pages) == (19, 5)
    assert provenance.transferred_bytes == 19 * 4


def test_tokens_that_were_found_when_the_turn_of_a_prompt_came_were_not_computed_for_it() -> None:
    """Two prompts that begin alike come at once: the second one is accepted before the first one's KV is in the cache."""
    world = World(local_prefill=False, prefill_pages=8)
    for name, last in (("a", 7), ("b", 8)):
        world.submit(request(name, (*PROMPT, last), 6))
    world.settle()
    told = [world.outputs[name][-1] for name in "ab"]
    computed = [output.provenance.prefilled_tokens for output in told if output.provenance is not None]
    assert [output.cached_tokens for output in told] == [0, 12]
    assert computed == [20, 8]
    assert sum(computed) == world.prefill.scheduler.stats.prefill_tokens


def test_phases_on_the_decode_worker_part_at_the_start_of_the_prompts_computation() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.settle()

    def read(name: str) -> float:
        return world.decode.metrics.registry.get_sample_value(name) or 0.0

    seconds = {name: read(f"jdisagg_request_{name}_seconds_sum") for name in ("queue", "prefill", "transfer", "decode")}
    counts = {name: read(f"jdisagg_request_{name}_seconds_count") for name in seconds}
    assert counts == dict.fromkeys(seconds, 1.0)
    assert seconds["prefill"] > 0, "time on P is not time in a queue"
    assert seconds["queue"] + seconds["prefill"] == pytest.approx(read("jdisagg_time_to_first_token_seconds_sum"))


def test_second_request_fetches_only_what_the_prefix_cache_lacks() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 3))
    world.settle()
    world.submit(request("b", (*PROMPT, 7, 8), 3))
    world.decode.tick(world.now_s)
    assert world.decode.loop is not None
    assert world.decode.loop.snapshot()["handoff"]["asked_tokens"] == {"p0": 21 - 16}
    world.settle()
    provenance = world.outputs["b"][-1].provenance
    assert world.tokens("b") == expected((*PROMPT, 7, 8), 3)
    assert provenance is not None
    assert provenance.transferred_tokens == 21 - 16  # the four full pages of "a" are here already


def test_the_prefill_worker_says_how_much_of_a_prompt_it_has() -> None:
    world, has = World(local_prefill=False), list[int]()
    to_decode = world.wire.to_decode

    def note(handoff: HandoffId, message: PrefillToDecode) -> None:
        if isinstance(message, Accepted):
            has.append(message.cached_tokens)
        to_decode(handoff, message)

    world.wire.to_decode = note  # type: ignore[method-assign]
    for name, prompt in (("a", PROMPT), ("b", (*PROMPT, 7, 8))):
        world.submit(request(name, prompt, 3))
        world.settle()
    assert has == [0, 16], "the four full pages of the first"


@pytest.mark.covers("D20")
def test_single_token_requests_transfer_nothing() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 1))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 1)
    assert world.outputs["a"][-1].provenance is not None
    assert world.outputs["a"][-1].provenance.transferred_bytes == 0


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("num_prefill_ticks", range(1, 9))
def test_reused_id_gets_nothing_of_the_cancelled_request(max_tokens: int, num_prefill_ticks: int) -> None:
    """Everything P sent for the old one, its cancel and the new one are read in one tick."""
    world = World(local_prefill=False)
    world.submit(request("a", tuple(range(3, 9)), max_tokens))
    world.decode.tick(0.01)
    for number in range(num_prefill_ticks):
        world.network.step()
        world.prefill.tick(0.02 + 0.01 * number)
    world.cancel("a")
    got: list[Output] = []
    world.decode.inbox.post(Submit(request("a", PROMPT, 6), got.extend))
    world.now_s = 0.5
    world.settle()
    assert [token for output in got for token in output.token_ids] == expected(PROMPT, 6)
    assert [output.finish for output in got if output.finish] == [FinishReason.LENGTH]
    assert world.outputs["a"] == []


def test_newer_attempt_takes_the_place_of_an_older_one() -> None:
    """A router whose stream broke replays here before this worker has seen the break."""
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    for _ in range(6):
        world.tick()
    delivered = tuple(world.tokens("a"))
    got: list[Output] = []
    world.decode.inbox.post(Submit(replace(request("a", PROMPT, 6, generated=delivered), attempt=1), got.extend))
    world.tick()
    world.cancel("a")  # the older attempt's, at last
    world.settle()
    assert [*delivered, *(token for output in got for token in output.token_ids)] == expected(PROMPT, 6)
    assert {output.attempt for output in got} == {1}
    assert tuple(world.tokens("a")) == delivered


class StrictPairMachine(PairMachine):
    """The same with a decode worker that must not prefill."""

    local_prefill = False


@pytest.mark.covers("I-2")
@pytest.mark.covers("I-3", "I-4", "X26")
@pytest.mark.parametrize("machine", [PairMachine, StrictPairMachine], ids=["on-failure", "never"])
def test_every_history_ends_exact_and_quiescent(machine: type[PairMachine]) -> None:
    assert run_state_machine_as_test(machine) is None  # the machine's teardown asserts
