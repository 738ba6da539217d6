"""The sampler against NumPy in float64, row by row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.requests import SamplingParams
from jdisagg.engine import state, updates
from jdisagg.engine.noise import gumbel
from jdisagg.engine.sampler import sample, score
from tests.unit.engine.support import admit

V, SLOTS = 50, 8
KNOWN = (-0.2894465, 0.9507085, 0.5842990, 1.1303267)  # noise of seed 7, choice 0, position 3
STEP = jax.jit(lambda logits, st, slots, at: sample(logits, st, state.take_rows(st, slots), at))
NOISE = jax.jit(lambda seeds, choices, at: gumbel(seeds, choices, at, V))


def oracle_scores(logits, params, prompt, generated, *, min_length, position, stops):
    """Scores after everything but noise, -inf where filtered; NumPy, sorts and all."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in set(prompt) | set(generated):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(generated):
        x[token] -= params.presence_penalty + generated.count(token) * params.frequency_penalty
    if position < min_length:
        x[list(stops)] = -np.inf
    if params.temperature == 0:
        return x
    x = x / params.temperature
    x = np.where(x >= x.max() + np.log(params.min_p), x, -np.inf) if params.min_p > 0 else x
    if params.top_k:
        order = np.argsort(-x, kind="stable")
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        mass = np.exp(x[order] - x.max())
        before = np.concatenate([[0.0], np.cumsum(mass / mass.sum())[:-1]])
        x[order[before >= params.top_p]] = -np.inf
    return x


def build_state(cases):
    """A state whose slot i holds case i = (params, prompt, generated)."""
    st = state.new_state(SLOTS, 2, V)
    admits = [admit(i, (1,), p, s, generated=g, decodes=True, choice=i % 2) for i, (s, p, g) in enumerate(cases)]
    for rows in updates.pack_admissions(admits, num_slots=SLOTS, width=2, vocab_size=V):
        st = state.admit(st, rows)
    for one in admits:
        if updates.is_shaped(one.sampling):
            for entries, bias in updates.pack_history(one, num_slots=SLOTS, vocab_size=V):
                st = state.add_history(st, jnp.asarray(entries), jnp.asarray(bias))
    return st


CASES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=3, seed=2),
    SamplingParams(temperature=1.3, top_p=0.6, seed=3),
    SamplingParams(temperature=1.0, min_p=0.2, top_k=20, top_p=0.9, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, logit_bias=((4, 3.0), (9, -100.0)), seed=5, repetition_penalty=0.8),
    SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(7, 8), logprobs=3),
]


@pytest.mark.parametrize("trial", range(6))
def test_every_parameter_equals_the_numpy_sampler(trial):
    rng = np.random.default_rng(trial)
    cases = []
    for params in CASES:
        prompt = rng.integers(0, V, 5).tolist()
        cases.append((params, prompt, rng.integers(0, V, 4).tolist()))
    logits = (rng.normal(size=(SLOTS, V)) * 2).astype(np.float32)
    logits[:, 7] += 4.0  # a stop id that greedy would like
    order = rng.permutation(SLOTS)
    at = np.array([len(p) + len(g) for _, p, g in cases], np.int32)
    out = STEP(logits[order], build_state(cases), order.astype(np.int32), at[order])
    seeds = np.array([cases[i][0].seed for i in order], np.uint32)
    noise = np.asarray(NOISE(seeds, (order % 2).astype(np.int32), at[order]), np.float64)
    for row, case in enumerate(order):
        params, prompt, generated = cases[case]
        scores = oracle_scores(
            logits[case],
            params,
            prompt,
            generated,
            min_length=5 + params.min_tokens,
            position=9,
            stops=(0, *params.stop_token_ids),
        )
        wanted = np.argmax(scores if params.temperature == 0 else scores + noise[row])
        assert out.tokens[row] == wanted, params
        log_softmax = logits[case] - np.log(np.exp(logits[case].astype(np.float64)).sum())
        best = np.argsort(-log_softmax, kind="stable")
        np.testing.assert_allclose(out.logprobs.chosen[row], log_softmax[wanted], atol=1e-5)
        np.testing.assert_array_equal(out.logprobs.top_ids[row], best[:20])
        np.testing.assert_allclose(out.logprobs.top[row], log_softmax[best[:20]], atol=1e-5)


def test_ties_go_to_the_lowest_ids_and_exactly_k_tokens_survive():
    cases = [(SamplingParams(temperature=1.0, top_k=2, seed=seed), [1], []) for seed in range(SLOTS)]
    cases[0] = (SamplingParams(temperature=0.0), [1], [])
    cases[1] = (SamplingParams(temperature=1.0, top_p=0.05, seed=1), [1], [])
    st, slots = build_state(cases), np.arange(SLOTS, dtype=np.int32)
    drawn = [
        np.asarray(STEP(np.zeros((SLOTS, V), np.float32), st, slots, np.full(SLOTS, at + 1, np.int32)).tokens)
        for at in range(12)
    ]
    assert {int(tokens[0]) for tokens in drawn} == {0}
    assert {int(tokens[1]) for tokens in drawn} <= {0, 1, 2}  # 0.05 of 50 equal tokens is 2.5 of them
    assert {int(token) for tokens in drawn for token in tokens[2:]} == {0, 1}


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.05)])
def test_both_zeros_tie(params):
    logits = np.full((SLOTS, V), -0.0, np.float32)
    logits[:, 2:] = 0.0
    st, slots = build_state([(replace(params, seed=seed), [1], []) for seed in range(SLOTS)]), np.arange(SLOTS, dtype=np.int32)
    drawn = [STEP(logits, st, slots, np.full(SLOTS, at + 1, np.int32)).tokens for at in range(6)]
    assert {int(token) for tokens in drawn for token in tokens} <= {0, 1, 2}


def test_a_top_p_that_float32_rounds_to_nothing_still_leaves_the_most_likely_token():
    tiny = [1e-30, 1.2e-38, 1.1e-38, 1e-40, 1e-50]
    cases = [(SamplingParams(temperature=1.0, top_p=tiny[slot % len(tiny)], seed=slot), [1], []) for slot in range(SLOTS)]
    logits = np.random.default_rng(3).normal(size=(SLOTS, V)).astype(np.float32)
    out = STEP(logits, build_state(cases), np.arange(SLOTS, dtype=np.int32), np.ones(SLOTS, np.int32))
    np.testing.assert_array_equal(out.tokens, logits.argmax(axis=-1))


@pytest.mark.parametrize("temperature", [1e-30, 2e-38, 1.2e-38, 1.1e-38, 1e-40, 1e-50])
def test_next_to_no_temperature_draws_the_most_likely_token(temperature):
    filters = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}]
    params = [SamplingParams(temperature=temperature, seed=slot, **filters[slot % len(filters)]) for slot in range(SLOTS)]
    logits = 10 * np.random.default_rng(3).normal(size=(SLOTS, V)).astype(np.float32)
    out = STEP(
        logits, build_state([(one, [1], []) for one in params]), np.arange(SLOTS, dtype=np.int32), np.ones(SLOTS, np.int32)
    )
    np.testing.assert_array_equal(out.tokens, logits.argmax(axis=-1))


def test_noise_is_pinned_and_depends_on_seed_choice_and_position_alone():
    rows = ((7, 0, 3), (7, 1, 3), (8, 0, 3), (7, 0, 4))
    seeds, choices, at = (np.array(column) for column in zip(*rows, strict=True))
    noise = NOISE(seeds.astype(np.uint32), choices.astype(np.int32), at.astype(np.int32))
    np.testing.assert_allclose(noise[0, :4], KNOWN, atol=2e-6)
    assert len({float(value) for value in noise[:, 0]}) == 4
    alone = NOISE(np.uint32([7]), np.int32([0]), np.int32([3]))
    np.testing.assert_array_equal(alone[0], noise[0])


def test_nan_is_reported_for_its_row_alone():
    logits = np.zeros((2, V), np.float32)
    logits[1, 3] = np.nan
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)):
        out = STEP(logits, build_state([(params, [1], [])] * 2), np.arange(2, dtype=np.int32), np.ones(2, np.int32))
        assert out.bad.tolist() == [False, True]
        assert ((out.tokens >= 0) & (out.tokens < V)).all(), "which is an index of the state's arrays"


def test_an_infinite_logit_is_reported_for_its_row_alone_and_a_forbidden_token_is_not():
    logits = np.zeros((3, V), np.float32)
    logits[1, 3], logits[2, 3] = np.inf, -np.inf
    st = build_state([(SamplingParams(temperature=0.0, logprobs=2), [1], [])] * 3)
    out = STEP(logits, st, np.arange(3, dtype=np.int32), np.ones(3, np.int32))
    assert out.bad.tolist() == [False, True, False]
    assert np.isfinite(np.asarray(out.logprobs.top)[~np.asarray(out.bad)]).all()


def test_every_log_probability_of_a_row_with_an_infinite_logit_is_nan():
    logits = np.zeros((3, V), np.float32)
    logits[1, 3], logits[2, 3] = np.inf, np.nan
    scored = jax.jit(score)(logits, np.zeros(3, np.int32))
    for values in (scored.chosen, scored.top[:, 0], scored.top[:, -1]):
        assert np.isnan(values).tolist() == [False, True, True]


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.2] + [1e-9] * (V - 3), np.float32))
    st = build_state([(SamplingParams(temperature=1.0, seed=11), [1], [])])
    count = 3000
    out = STEP(np.tile(logits, (count, 1)), st, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    shares = np.bincount(np.asarray(out.tokens), minlength=V)[:3] / count
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=4 * np.sqrt(0.25 / count))
