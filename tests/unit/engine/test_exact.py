"""`exact` numerics: a token's bits depend on weights and prefix alone, not on chunks, lanes, neighbours, pages or phase."""

import dataclasses

import jax
import numpy as np
import pytest

from jdisagg.core.config import Numerics
from jdisagg.core.requests import SamplingParams
from jdisagg.engine.packing import pack_exact
from tests.unit.engine.support import Driver, admit, chunk_up, make, prompt_of, tokens

PROMPT = prompt_of(21)
SEEDED = SamplingParams(temperature=1.0, seed=5, logprobs=20, max_tokens=64)


@pytest.fixture(scope="module", params=[("float32", None), ("bfloat16", None), ("float32", "int8")], ids=str)
def runner(request):
    dtype, kv_dtype = request.param
    return make(numerics=Numerics.EXACT, dtype=dtype, kv_dtype=kv_dtype, num_pages=80)


def bits(sampled):
    """Everything a client sees of each token, floats as their bits."""
    return [(one.token_ids, one.logprobs) for one in sampled]


@pytest.fixture(scope="module")
def reference(runner):
    return bits(Driver(runner).generate(0, range(1, 17), PROMPT, SEEDED, num=12))


@pytest.mark.parametrize("chunks", [[21], [1] * 21, [7, 3, 11], [16, 5]])
def test_chunking_and_pages_do_not_show(runner, reference, chunks):
    pages = np.random.default_rng(len(chunks)).permutation(np.arange(1, 80))[:16].tolist()
    assert bits(Driver(runner).generate(3, pages, PROMPT, SEEDED, chunks=chunks, num=12)) == reference


@pytest.mark.covers("I-6")
def test_decoding_beside_junk_and_other_prompts_does_not_show(runner, reference):
    driver = Driver(runner)
    rng = np.random.default_rng(1)
    junk = [prompt_of(30, seed=9), prompt_of(5, seed=8)]
    results = [
        driver.run(
            admit=(admit(0, range(1, 17), junk[0]), admit(1, range(20, 36), junk[1]), admit(2, range(40, 56), PROMPT, SEEDED)),
            prefill=(*chunk_up(0, junk[0], [30]), *chunk_up(2, PROMPT, [21])),
        )
    ]
    for chunk in chunk_up(1, junk[1], [1] * 5):  # one prompt token of somebody else in every step
        results.append(driver.run(prefill=(chunk,), decode=tuple(rng.permutation([0, 2]).tolist())))
    results += [driver.run(decode=tuple(rng.permutation([0, 1, 2]).tolist())) for _ in range(6)]
    assert bits([one for result in results for one in result.sampled if one.slot == 2]) == reference


@pytest.mark.covers("I-6")
def test_feeding_generated_tokens_again_gives_the_same_next_token(runner, reference):
    known = [token for ids, _ in reference for token in ids]
    driver = Driver(runner)
    for num in (1, 5, 11):  # replay, retraction: prompt and generated tokens are prefilled again
        again = PROMPT + known[:num]
        request = admit(1, range(30, 46), PROMPT, SEEDED, generated=known[:num])
        result = driver.run(admit=(request,), prefill=chunk_up(1, again, [len(again)]))
        assert bits(result.sampled) == [reference[num]]
        if num + 1 < len(reference):
            assert bits(driver.run(decode=(1,)).sampled) == [reference[num + 1]]


def test_admission_with_kv_in_place_continues_the_stream(runner, reference):
    known = [token for ids, _ in reference for token in ids]
    driver = Driver(runner)
    driver.generate(0, range(1, 17), PROMPT, SEEDED, num=4)  # leaves KV of 24 tokens in pages 1..16
    request = admit(2, range(1, 17), PROMPT, SEEDED, generated=known[:4], decodes=True)
    driver.run(admit=(request,))
    assert bits([one for _ in range(4) for one in driver.run(decode=(2,)).sampled]) == reference[4:8]


def test_log_probabilities_are_bit_equal(runner):
    """Streams could hide a flipped bit: compare the twenty best log-probabilities as bytes."""
    seen = set()
    for chunks in ([21], [5, 16], [1] * 21):
        driver = Driver(runner)
        driver.run(admit=(admit(0, range(1, 17), PROMPT, SEEDED),))
        handles = [driver.dispatch(prefill=(chunk,)) for chunk in chunk_up(0, PROMPT, chunks)]
        part = handles[-1].parts[-1]
        row = part.packed.samples[0][0]
        logprobs = part.out.sampling.logprobs
        seen.add(np.asarray(logprobs.top[row]).tobytes() + np.asarray(logprobs.top_ids[row]).tobytes())
    assert len(seen) == 1


def test_replays_vary_in_token_ids(runner, reference):
    """The comparisons above would be worthless on a stream that repeats one token."""
    del runner
    assert len({ids for ids, _ in reference}) >= 6


def test_unlike_page_sizes_and_pool_sizes_do_not_show(reference, runner):
    kv_dtype = runner.device.layout.spec.dtype
    dtype = "float32" if kv_dtype == "int8" else kv_dtype
    other = make(numerics=Numerics.EXACT, dtype=dtype, kv_dtype=kv_dtype, page_size=16, num_pages=9)
    assert bits(Driver(other).generate(0, [5, 2, 7, 3], PROMPT, SEEDED, num=12)) == reference


def test_decode_rows_share_a_tile_with_prompt_tokens():
    chunks = chunk_up(1, prompt_of(20), [20])
    steps = list(pack_exact(chunks, (0, 3), dummy_slot=4))
    assert [len(step.samples) for step in steps] == [2, 1]
    assert steps[0].batch.slots.tolist() == [0, 3] + [1] * 14
    assert steps[1].batch.positions[:6].tolist() == list(range(14, 20))


def test_greedy_equals_the_fast_step_where_rounding_does_not_decide():
    exact, fast = make(numerics=Numerics.EXACT), make()
    greedy = dataclasses.replace(SEEDED, temperature=0.0)
    streams = [tokens(Driver(runner).generate(0, range(1, 17), PROMPT, greedy, num=12)) for runner in (exact, fast)]
    assert streams[0] == streams[1]
    assert jax.default_backend() == "cpu"
