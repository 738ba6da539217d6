"""What the device knows of slots, as they change hands, and what padding leaves alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.core.requests import Grammar, GrammarKind, SamplingParams
from jdisagg.engine import state as slots
from jdisagg.engine import updates
from jdisagg.engine.state import PROMPT_BIT, DecodeState
from jdisagg.sched.plan import Admit, PageAppend
from tests.unit.engine.support import admit

NUM_SLOTS, WIDTH, VOCAB = 3, 4, 40
SIZES = {"num_slots": NUM_SLOTS, "vocab_size": VOCAB}
SHAPED = SamplingParams(temperature=0.5, top_k=3, seed=2**32 - 1, presence_penalty=1.0, logit_bias=((4, 2.0),), logprobs=2)


def filled(*admits: Admit, state: DecodeState | None = None) -> DecodeState:
    """As the runner does it."""
    state = state if state is not None else slots.new_state(NUM_SLOTS, WIDTH, VOCAB)
    for rows in updates.pack_admissions(admits, width=WIDTH, **SIZES):
        state = slots.admit(state, rows)
    for one in admits:
        for entries, bias in updates.pack_history(one, **SIZES):
            state = slots.add_history(state, jnp.asarray(entries), jnp.asarray(bias))
    return state


def assert_equal(got: DecodeState, wanted: DecodeState) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_who_comes_into_a_slot_finds_nothing_of_who_was_there() -> None:
    before = admit(1, (7, 8, 9), (3, 4, 5), SHAPED, generated=(6, 6))
    after = admit(1, (2,), (9,), SamplingParams(temperature=0.0))
    assert_equal(filled(after, state=filled(before)), filled(after))


def test_padding_of_an_update_changes_no_slot_and_not_the_dummy() -> None:
    state = filled(admit(0, (7,), (3,), SHAPED), admit(2, (8,), (4, 5), SHAPED))
    changed = slots.admit(state, updates.empty_admissions(width=WIDTH, **SIZES))
    changed = slots.append_pages(changed, jnp.asarray(updates.empty_appends(NUM_SLOTS)))
    changed = slots.add_history(changed, *map(jnp.asarray, updates.empty_history(NUM_SLOTS)))
    changed = slots.allow(changed, *map(jnp.asarray, updates.empty_masks(NUM_SLOTS, VOCAB)))
    changed = slots.record_tokens(changed, jnp.full(2, NUM_SLOTS), jnp.full(2, 5), jnp.full(2, 9))  # rows of a step
    assert_equal(changed, state)


def test_a_token_is_fed_next_and_counted_where_it_was_sampled() -> None:
    state = filled(admit(0, (7,), (3, 4), SHAPED), admit(2, (8,), (4, 5), SHAPED, generated=(6,)))
    state = slots.record_tokens(state, jnp.asarray([2, 0, NUM_SLOTS]), jnp.asarray([6, 3, 1]), jnp.asarray([3, 2, 0]))
    assert state.cursor[:, (0, 2)].tolist() == [[3, 6], [3, 4]], "the last tokens, and how many there are"
    assert (int(state.history[0, 3]), int(state.history[2, 6])) == (PROMPT_BIT + 1, 2)
    assert int(state.history[:, 1].sum()) == 0


def test_pages_and_masks_go_to_their_slots() -> None:
    state = filled(admit(0, (7,), (3,)), admit(1, (8, 9), (3,)))
    appends = [PageAppend(slot=slot, index=index, page=page) for slot, index, page in ((1, 2, 5), (0, 1, 6), (1, 3, 4))]
    for entries in updates.pack_appends(appends, num_slots=NUM_SLOTS):
        state = slots.append_pages(state, jnp.asarray(entries))
    assert state.page_table[:2].tolist() == [[7, 6, 0, 0], [8, 9, 5, 4]]
    ((where, words),) = updates.pack_masks({1: bytes(range(1, 9))}, **SIZES)
    state = slots.allow(state, jnp.asarray(where), jnp.asarray(words))
    assert np.asarray(state.allowed[1]).tobytes() == bytes(range(1, 9))
    assert not state.allowed[jnp.asarray([0, 2, 3])].any()


def test_a_row_reads_what_its_slot_was_given() -> None:
    by_grammar = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"), min_p=0.25)
    state = filled(admit(0, (7,), (3,), SHAPED, choice=4), admit(1, (8,), (3, 4), by_grammar))
    rows = slots.take_rows(state, jnp.asarray([1, 0, NUM_SLOTS]))
    assert (rows.seed.tolist(), rows.choice.tolist()) == ([0, 2**32 - 1, 0], [0, 4, 0])
    assert (rows.temperature.tolist(), rows.min_p.tolist()) == ([1.0, 0.5, 0.0], [0.25, 0.0, 0.0])
    assert (rows.top_k.tolist(), rows.num_top.tolist()) == ([VOCAB, 3, VOCAB], [-1, 2, -1])
    assert (rows.shaped.tolist(), rows.constrained.tolist()) == ([False, True, False], [True, False, False])
