"""One sequence's tokens and counters, and that results from before a preemption or an end are void."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, expected, request

TOKENS = st.lists(st.integers(0, 99), max_size=8).map(tuple)


def sequence(prompt: tuple[int, ...] = (1, 2, 3), generated: tuple[int, ...] = (), max_tokens: int = 9) -> Sequence:
    """One that waits with everything known to be computed."""
    asked = request("a", prompt, max_tokens, generated=generated)
    return Sequence(request=asked, order=(0, 0), status=Status.WAITING, target=asked.num_tokens, stop_ids=frozenset())


@given(prompt=TOKENS.filter(bool), generated=TOKENS, data=st.data())
def test_ranges_run_over_prompt_and_output_as_over_one_list(
    prompt: tuple[int, ...], generated: tuple[int, ...], data: st.DataObject
) -> None:
    whole = prompt + generated
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    assert sequence(prompt, generated).tokens(begin, end) == whole[begin:end]


@given(generated=TOKENS, in_flight=st.integers(0, 3))
def test_wanted_known_and_longest_count_from_the_same_tokens(generated: tuple[int, ...], in_flight: int) -> None:
    one = sequence(generated=generated, max_tokens=5)
    one.num_in_flight = in_flight
    assert one.num_known == 3 + len(generated)
    assert one.num_wanted == 5 - len(generated) - in_flight
    assert one.max_len == max(8, one.num_known)


def test_forgetting_keeps_the_tokens_and_makes_all_of_them_the_target() -> None:
    one = sequence(generated=(7, 8))
    one.target, one.num_computed, one.num_scheduled, one.num_in_flight = 3, 4, 5, 1
    one.forget_computed()
    assert (one.target, one.num_computed, one.num_scheduled, one.num_in_flight) == (5, 0, 0, 0)
    assert one.resumed_request() == replace(one.request, generated_token_ids=(7, 8))


def test_decoding_goes_on_from_kv_of_all_tokens_but_the_last_and_from_nothing_else() -> None:
    one = sequence(generated=(7, 8))
    for wrong in (3, 5):
        with pytest.raises(AssertionError, match=f"a: {wrong} of 5 tokens have KV"):
            one.continue_from(wrong)
    one.continue_from(4)
    assert (one.target, one.num_computed, one.num_scheduled) == (4, 4, 4)
    assert one.is_decoding


@pytest.mark.parametrize("runs_again", [False, True])
def test_results_of_a_sequence_that_was_preempted_and_then_ended_are_void(runs_again: bool) -> None:
    engine = FakeEngine(num_pages=8)
    prompts = {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8), "c": (9, 10, 11, 12)}
    engine.add(*(request(name, prompt, 12) for name, prompt in prompts.items()))
    while not engine.scheduler.stats.preemptions:
        assert engine.scheduler.table.live, "nobody was preempted"
        engine.commit_one()
        engine.step()
        engine.step()
    states = {s["request_id"]: s["status"] for s in engine.scheduler.snapshot()["sequences"]}
    victim = "c"
    assert states[victim] == "waiting"
    assert any(s.slot == 2 for result in engine.in_flight for s in result.sampled)  # its tokens are on their way
    while runs_again and engine.scheduler.table.live[victim].num_in_flight < 2:
        engine.commit_one()
        engine.step()
    got = list(engine.seen[victim].tokens)
    engine.scheduler.cancel(victim)
    engine.run()
    assert engine.seen[victim].tokens == got
    for name in set(prompts) - {victim}:
        assert engine.seen[name].tokens == expected(prompts[name], 12)
