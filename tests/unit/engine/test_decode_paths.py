"""`fast` numerics: the step for decode rows and the step for ragged rows are one model, token for token."""

import dataclasses

import pytest

from jdisagg.core.requests import SamplingParams
from tests.unit.engine.support import GREEDY, Driver, admit, chunk_up, make, prompt_of, tokens

SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0, seed=5, max_tokens=64),
    "penalties": SamplingParams(temperature=0.8, seed=9, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=64),
}
NUM = 22


@pytest.fixture(scope="module")
def runner():
    return make(num_pages=80)


def by_ragged_rows(driver, slot, pages, prompt, sampling):
    """Every generated token is computed as a prompt chunk of one token."""
    (whole,) = chunk_up(slot, prompt, [len(prompt)])
    known = [*prompt, *tokens(driver.run(admit=(admit(slot, pages, prompt, sampling),), prefill=(whole,)).sampled)]
    while len(known) < len(prompt) + NUM:
        chunk = dataclasses.replace(whole, start=len(known) - 1, token_ids=(known[-1],))
        known += tokens(driver.run(prefill=(chunk,)).sampled)
    driver.run(evict=(slot,))
    return known[len(prompt) :]


@pytest.mark.covers("H13")
@pytest.mark.parametrize("length", [1, 4, 5, 15, 40])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_decode_rows_give_the_tokens_of_ragged_rows(runner, sampling, length):
    driver, prompt = Driver(runner), prompt_of(length, seed=length)
    wanted = by_ragged_rows(driver, 1, range(20, 36), prompt, sampling)
    assert tokens(driver.generate(2, range(40, 56), prompt, sampling, num=NUM)) == wanted
    assert len(set(wanted)) > 5
