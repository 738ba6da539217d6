"""Sampling by a grammar on the real device: masks against NumPy, whole answers, slots that change hands, replays."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from jdisagg.core.config import CacheConfig, Config, ModelConfig, Numerics, SchedulerConfig
from jdisagg.core.requests import Grammar, GrammarKind, Role, SamplingParams
from jdisagg.engine import state, updates
from jdisagg.engine.build import make_runner
from jdisagg.engine.compiles import CompileCounter
from jdisagg.engine.sampler import sample
from jdisagg.engine.warmup import warm_up
from jdisagg.text.bad_words import without
from jdisagg.text.grammar import Grammars, Vocabulary
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.engine.support import Driver, admit, chunk_up, load

DEMO = Path(__file__).parents[3] / "jdisagg" / "demo"
EOS = 5
VOCAB = 4100  # more than the tokenizer has, and no multiple of 32
PROMPT = (70, 80, 90, 100, 110)
WORD = Grammar(GrammarKind.REGEX, "[a-z]{4}-[0-9]{3}")
NUMBER = Grammar(GrammarKind.REGEX, "[0-9]{8}")
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
STEP = jax.jit(lambda logits, st, slots, at: sample(logits, st, state.take_rows(st, slots), at))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DEMO)


@cache
def grammars() -> Grammars:
    return Grammars(Vocabulary(tokenizer().to_json(), VOCAB, (EOS,), ()))


def driver(numerics: Numerics = Numerics.FAST, *, served: bool = True, max_num_seqs: int = 4) -> Driver:
    config = Config(
        model=ModelConfig(numerics=numerics, max_model_len=64),
        cache=CacheConfig(page_size=4, num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
    )
    return Driver(make_runner(*load(vocab_size=VOCAB), config, Role.UNIFIED, grammars() if served else None))


def answer(run: Driver, slot: int, sampling: SamplingParams, generated: tuple[int, ...] = ()) -> list[int]:
    """To its EOS, a step at a time."""
    pages = range(1 + 16 * slot, 17 + 16 * slot)
    tokens = [*generated]
    known = (*PROMPT, *generated)
    (first,) = run.run(
        admit=(_admitted(slot, pages, sampling, generated),), prefill=chunk_up(slot, known, [len(known)])
    ).sampled
    tokens += first.token_ids
    while tokens[-1] != EOS and len(tokens) < 32:
        (one,) = run.run(decode=(slot,)).sampled
        assert one.refused is None
        tokens += one.token_ids
    run.run(evict=(slot,))
    return tokens


def _admitted(slot: int, pages: range, sampling: SamplingParams, generated: tuple[int, ...] = ()):
    return admit(slot, pages, PROMPT, sampling, generated=generated, eos=(EOS,))


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


def test_an_answer_with_bad_words_is_the_models_own_up_to_the_first_of_them_and_holds_none() -> None:
    run, banned = driver(), list[str]()
    free = before = text_of(answer(run, 0, GREEDY))
    for _ in range(4):
        banned.append(before[4:6])
        text = text_of(answer(run, 0, replace(GREEDY, grammar=without(banned))))
        assert not [word for word in banned if word in text]
        assert text[:3] == before[:3]
        before = text
    assert before != free


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_takes_the_best_of_what_its_mask_allows_and_its_neighbours_take_no_notice(temperature: float) -> None:
    rng, vocab_size, slots = np.random.default_rng(0), 50, 4
    bits = rng.random((slots, 64)) < 0.2
    bits[:, 50:] = True  # behind the vocabulary
    params = SamplingParams(temperature=temperature, seed=3, top_k=30)
    bound = [True, False, True, False]
    st = state.new_state(slots, 2, vocab_size)
    admits = [admit(i, (1,), (1, 2), replace(params, grammar=WORD if is_bound else None)) for i, is_bound in enumerate(bound)]
    for rows in updates.pack_admissions(admits, num_slots=slots, width=2, vocab_size=vocab_size):
        st = state.admit(st, rows)
    packed = np.packbits(bits, axis=1, bitorder="little")
    masks = {slot: packed[slot].tobytes() + b"\xff\xff\xff\xff" for slot in range(slots)}
    before = st
    for where, words in updates.pack_masks(masks, num_slots=slots, vocab_size=vocab_size):
        st = state.allow(st, where, words)
    for trial in range(8):
        logits = rng.normal(size=(slots, vocab_size)).astype(np.float32) * 3
        at = np.full(slots, 5 + trial, np.int32)
        got, free = (np.asarray(STEP(logits, one, np.arange(slots), at).tokens) for one in (st, before))
        for slot in range(slots):
            if not bound[slot]:
                assert got[slot] == free[slot]
                continue
            assert bits[slot, got[slot]]
            allowed = np.where(bits[slot, :vocab_size], logits[slot], -np.inf)
            if temperature == 0.0:
                assert got[slot] == np.argmax(allowed)


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.EXACT])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_are_of_their_grammar_and_end_where_it_ends(numerics: Numerics, temperature: float) -> None:
    run = driver(numerics)
    for seed in range(4):
        tokens = answer(run, seed, replace(GREEDY, grammar=WORD, temperature=temperature, seed=seed))
        assert tokens[-1] == EOS
        assert re.fullmatch(WORD.text, text_of(tokens[:-1]))


def test_json_of_a_schema() -> None:
    schema = '{"type":"object","properties":{"ok":{"type":"boolean"}},"required":["ok"],"additionalProperties":false}'
    grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
    tokens = answer(driver(), 0, replace(GREEDY, grammar=grammar, temperature=1.0, logit_bias=((30, -100.0),)))
    assert re.fullmatch(r'\{\s*"ok"\s*:\s*(true|false)\s*\}?', text_of(tokens[:-1])) or len(tokens) == 32


def test_a_replay_from_any_token_on_is_the_same_answer() -> None:
    run = driver(Numerics.EXACT)
    sampling = replace(GREEDY, grammar=WORD, temperature=1.2, seed=9)
    whole = answer(run, 0, sampling)
    for num_known in range(1, len(whole)):
        assert answer(run, num_known % 4, sampling, tuple(whole[:num_known])) == whole


def test_a_slot_that_changes_hands_before_its_last_step_is_read() -> None:
    run = driver()
    word, number = replace(GREEDY, grammar=WORD, temperature=1.0), replace(GREEDY, grammar=NUMBER, temperature=1.0)
    of_word = run.dispatch(admit=(_admitted(0, range(1, 17), word),), prefill=chunk_up(0, PROMPT, [len(PROMPT)]))
    of_number = run.dispatch(
        evict=(0,), admit=(_admitted(0, range(17, 33), number),), prefill=chunk_up(0, PROMPT, [len(PROMPT)])
    )
    (first,) = run.runner.collect(of_word).sampled
    assert first.refused is None
    assert re.match("[a-z]", text_of(list(first.token_ids)))
    (first,) = run.runner.collect(of_number).sampled
    tokens = [*first.token_ids]
    while tokens[-1] != EOS:
        (one,) = run.run(decode=(0,)).sampled
        assert one.refused is None
        tokens += one.token_ids
    assert re.fullmatch(NUMBER.text, text_of(tokens[:-1]))


def test_more_slots_than_one_update_holds_and_others_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "MASK_ROWS", 2)
    run = driver()
    grammar_of = {0: WORD, 1: None, 2: NUMBER, 3: WORD}
    admits = tuple(
        _admitted(slot, range(1 + 15 * slot, 16 + 15 * slot), replace(GREEDY, grammar=grammar, temperature=1.0, seed=slot))
        for slot, grammar in grammar_of.items()
    )
    chunks = tuple(chunk_up(slot, PROMPT, [len(PROMPT)])[0] for slot in grammar_of)
    tokens = {one.slot: list(one.token_ids) for one in run.run(admit=admits, prefill=chunks).sampled}
    while going := tuple(slot for slot, got in tokens.items() if got[-1] != EOS and len(got) < 12):
        for one in run.run(decode=going).sampled:
            tokens[one.slot] += one.token_ids
    for slot, grammar in grammar_of.items():
        if grammar is not None:
            assert re.fullmatch(grammar.text, text_of(tokens[slot][:-1]))


@pytest.mark.parametrize(
    ("grammar", "generated", "served", "why"),
    [
        (WORD, (), False, "tokenizer"),
        (Grammar(GrammarKind.REGEX, "("), (), True, "regex"),
        (NUMBER, (EOS, EOS), True, "token"),
    ],
    ids=["not served", "no grammar", "tokens of another"],
)
def test_who_cannot_go_on_is_refused_and_its_neighbour_is_not(
    grammar: Grammar, generated: tuple[int, ...], served: bool, why: str
) -> None:
    run = driver(served=served)
    alone = answer(run, 1, GREEDY)
    stuck, fine = replace(GREEDY, grammar=grammar), GREEDY
    known = (*PROMPT, *generated)
    chunks = chunk_up(0, known, [len(known)]) + chunk_up(1, PROMPT, [len(PROMPT)])
    admits = (_admitted(0, range(1, 17), stuck, generated), _admitted(1, range(17, 33), fine))
    refused, other = sorted(run.run(admit=admits, prefill=chunks).sampled, key=lambda one: one.slot)
    assert refused.refused is not None
    assert why in refused.refused
    assert (other.refused, other.token_ids[0]) == (None, alone[0])


def test_nothing_compiles_for_the_first_grammar() -> None:
    run, counter = driver(max_num_seqs=3), CompileCounter()  # in a shape that nobody else has
    warm_up(run.runner)
    before = counter.count
    answer(run, 0, replace(GREEDY, grammar=WORD))
    assert counter.count == before
