"""The runner: chunked equals whole, overlap equals none, nothing compiles after warm-up, pieces survive the way out and in."""

import logging
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jdisagg.core.requests import Role, SamplingParams
from jdisagg.engine.compiles import CompileCounter
from jdisagg.engine.functions import jit_functions
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.packing import Packed, empty_exact, empty_prefill, empty_score
from jdisagg.engine.results import Part
from jdisagg.engine.runner import Dispatched
from jdisagg.engine.sampler import Sampling
from jdisagg.engine.state import new_state
from jdisagg.engine.steps import StepOut
from jdisagg.engine.warmup import warm_up
from jdisagg.models.decoder import DecoderModel
from jdisagg.sched.plan import Plan
from tests.unit.engine.support import GREEDY, VOCAB, Driver, admit, append, chunk_up, load, make, prompt_of, tokens

PROMPT = prompt_of(21)


@pytest.fixture(scope="module")
def runner():
    return make(num_pages=80)


@pytest.fixture(scope="module")
def reference(runner):
    return tokens(Driver(runner).generate(0, range(1, 17), PROMPT, num=12))


@pytest.mark.parametrize("chunks", [[7, 3, 11], [16, 5], [1, 20]])
def test_chunked_prefill_gives_the_same_greedy_tokens(runner, reference, chunks):
    assert len(set(reference)) >= 6
    pages = np.random.default_rng(0).permutation(np.arange(1, 80))[:16].tolist()
    assert tokens(Driver(runner).generate(2, pages, PROMPT, chunks=chunks, num=12)) == reference


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_give_the_same_greedy_tokens(reference, tp):
    assert tokens(Driver(make(tp=tp, num_pages=80)).generate(0, range(1, 17), PROMPT, num=12)) == reference


def test_a_plan_larger_than_the_largest_bucket_is_split(runner, reference):
    driver = Driver(runner)
    others = [prompt_of(40, seed=7), prompt_of(33, seed=6)]
    admits = (admit(0, range(1, 17), others[0]), admit(1, range(20, 36), PROMPT), admit(2, range(40, 56), others[1]))
    chunks = (*chunk_up(0, others[0], [40]), *chunk_up(1, PROMPT, [21]), *chunk_up(2, others[1], [33]))
    result = driver.run(admit=admits, prefill=chunks)  # 8 tiles, the bucket has 4
    assert sorted(one.slot for one in result.sampled) == [0, 1, 2]
    got = [one for one in result.sampled if one.slot == 1]
    got += [one for _ in range(11) for one in driver.run(decode=(2, 1, 0)).sampled if one.slot == 1]
    assert tokens(got) == reference


@pytest.mark.covers("D25")
def test_dispatching_ahead_of_reading_changes_nothing(runner, reference):
    driver = Driver(runner)
    handles = [driver.dispatch(admit=(admit(1, range(1, 17), PROMPT),), prefill=chunk_up(1, PROMPT, [21]))]
    handles += [driver.dispatch(decode=(1,)) for _ in range(11)]
    results = [runner.collect(handle) for handle in handles]
    assert tokens([one for result in results for one in result.sampled]) == reference
    assert [result.step_id for result in results] == sorted(result.step_id for result in results)


def test_pages_appended_one_by_one_give_the_same_tokens(runner, reference):
    driver = Driver(runner)
    pages = list(range(60, 70))
    results = [driver.run(admit=(admit(0, pages[:6], PROMPT),), prefill=chunk_up(0, PROMPT, [21]))]
    for position in range(21, 32):
        grown = (append(0, position // 4, pages[position // 4]),) if position % 4 == 0 else ()
        results.append(driver.run(pages=grown, decode=(0,)))
    assert tokens([one for result in results for one in result.sampled]) == reference


def test_prompt_logprobs_agree_with_a_token_by_token_run(runner):
    driver = Driver(runner)
    driver.run(admit=(admit(0, range(1, 17), PROMPT),))
    results = [driver.run(prefill=(chunk,)) for chunk in chunk_up(0, PROMPT, [9, 12], num_top=3)]
    got = [one for result in results for one in result.prompt_logprobs[0]]
    assert [one.token_id for one in got] == PROMPT[1:]
    asked = SamplingParams(temperature=0.0, logprobs=3)
    for end in (1, 8, 15):  # the token sampled after a shorter prompt has the distribution of the next prompt token
        sampled = driver.run(admit=(admit(1, range(20, 36), PROMPT[:end], asked),), prefill=chunk_up(1, PROMPT[:end], [end]))
        top = sampled.sampled[0].logprobs[0].top
        assert [token for token, _ in top] == [token for token, _ in got[end - 1].top]
        np.testing.assert_allclose([value for _, value in top], [value for _, value in got[end - 1].top], atol=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_of_one_step_are_scored_in_several_calls(runner, tp):
    """More tokens than one call takes, and a prompt whose first ones are in the one and the rest in the other."""
    prompts = [prompt_of(60, seed=seed) for seed in range(2)]
    wide = make(num_pages=80, max_num_batched_tokens=128, tp=tp)
    admits = tuple(admit(slot, range(1 + 20 * slot, 17 + 20 * slot), prompt) for slot, prompt in enumerate(prompts))
    chunks = tuple(chunk for slot, prompt in enumerate(prompts) for chunk in chunk_up(slot, prompt, [60], num_top=2))
    together = Driver(wide).run(admit=admits, prefill=chunks)
    for slot, prompt in enumerate(prompts):
        alone = Driver(runner).run(admit=(admits[slot],), prefill=(chunks[slot],)).prompt_logprobs[slot]
        got = together.prompt_logprobs[slot]
        assert [one.token_id for one in got] == [one.token_id for one in alone] == prompt[1:]
        np.testing.assert_allclose([one.logprob for one in got], [one.logprob for one in alone], atol=3e-4)
        assert [[token for token, _ in one.top] for one in got] == [[token for token, _ in one.top] for one in alone]


@pytest.mark.parametrize("late", ["tokens", "prompt"])
def test_a_step_is_done_with_the_last_of_its_parts(runner, late):
    """Prompts are scored behind the step that computed them, and `collect` waits for both."""

    def array(name):
        return SimpleNamespace(is_ready=lambda: name != late)

    out = StepOut(Sampling(tokens=array("tokens"), bad=array("bad"), logprobs=None), (array("prompt"),))
    assert not runner.is_done(Dispatched(1, (Part(Packed(None, ()), out, {}),), {}))
    assert runner.is_done(Dispatched(1, (), {}))


def test_nan_kv_fails_its_own_request_and_no_other(runner, reference):
    driver = Driver(runner)
    driver.run(admit=(admit(0, range(1, 17), PROMPT), admit(1, range(20, 36), PROMPT)), prefill=chunk_up(0, PROMPT, [21]))
    driver.run(prefill=chunk_up(1, PROMPT, [21]))
    poison = runner.export_tokens((tuple(range(20, 36)),), 0, 8)
    nan = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), poison.data)
    runner.import_tokens((tuple(range(20, 36)),), type(poison)(begin=0, end=8, data=nan))
    results = [driver.run(decode=(0, 1)) for _ in range(11)]
    healthy = [one for result in results for one in result.sampled if one.slot == 0]
    assert tokens(healthy) == reference[1:]
    assert all(one.bad is None for one in healthy)
    assert all("NaN" in one.bad for result in results for one in result.sampled if one.slot == 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tp_from", "tp_to"), [(1, 1), (1, 4), (2, 1)])
def test_pieces_are_byte_exact_between_unlike_page_sizes_and_meshes(dtype, tp_from, tp_to):
    source = make(dtype=dtype, page_size=4, tp=tp_from, num_pages=80)  # compiled above, in float32
    target = make(dtype=dtype, page_size=8, tp=tp_to, num_pages=20)
    Driver(source).run(admit=(admit(0, range(1, 17), PROMPT),), prefill=chunk_up(0, PROMPT, [21]))
    out, there = (tuple(range(1, 17)),), ((9, 3, 14, 6),)
    sent = []
    for begin, end in ((0, 8), (8, 16), (16, 21)):
        piece = source.export_tokens(out, begin, end)
        host = np.asarray(piece.data)
        assert host.shape == (2, 8, 2, 16)
        sent.append(host[:, : end - begin])
        arrived = jax.device_put(host, target.device.piece_sharding)
        target.import_tokens(there, type(piece)(begin=begin, end=end, data=arrived))
    wanted = np.concatenate(sent, axis=1)
    assert np.isfinite(wanted.astype(np.float32)).all()
    assert wanted.any()
    back = [np.asarray(target.export_tokens(there, begin, min(begin + 5, 21)).data) for begin in range(0, 21, 5)]
    got = np.concatenate([piece[:, : min(5, 21 - 5 * i)] for i, piece in enumerate(back)], axis=1)
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.covers("I-8")
@pytest.mark.parametrize(("role", "num_cores"), [(Role.PREFILL, 3), (Role.DECODE, 1)])
def test_nothing_compiles_after_warm_up(role, num_cores, caplog):
    runner, counter = make(role=role, max_num_seqs=4, max_num_batched_tokens=128), CompileCounter()
    assert len(runner.shape.prefill) == 2, "whose prompts are scored by one executable"
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        warmed = warm_up(runner, num_cores=num_cores)
    assert 0 < counter.count <= len(warmed), "what is run is what was compiled beside the others"
    assert _compilations(caplog)
    caplog.clear()
    assert len(warmed) <= 10
    assert all(one.seconds > 0 for one in warmed)
    compiled = counter.count
    rng = np.random.default_rng(0)
    driver = Driver(runner)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for turn in range(50):
            _mixed_turn(driver, runner, role, rng, turn)
    assert counter.count == compiled
    assert not _compilations(caplog)


def _compilations(caplog):
    return [record.message for record in caplog.records if "ompil" in record.message]


def _mixed_turn(driver, runner, role, rng, turn):
    slot, length = turn % 4, int(rng.integers(1, 60))
    prompt = prompt_of(length, seed=turn)
    sampling = [
        GREEDY,
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=turn, logprobs=turn % 5),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, logit_bias=((3, 1.0),), min_tokens=2),
    ][turn % 3]
    pages = tuple(range(1 + 16 * (slot % 3), 17 + 16 * (slot % 3)))
    chunks = chunk_up(slot, prompt, [length], num_top=2 if turn % 7 == 0 else None)
    handle = driver.dispatch(admit=(admit(slot, pages, prompt, sampling),), pages=(append(slot, 1, pages[1]),), prefill=chunks)
    if role is Role.DECODE:
        runner.collect(driver.dispatch(decode=tuple(range(min(turn + 1, 4)))))
        piece = jax.device_put(jax.device_get(runner.device.empty_piece()), runner.device.piece_sharding)
        runner.device.import_piece(piece, np.zeros((2, 8), np.int32))
    else:
        runner.export_tokens((pages,), 0, min(length, 8))
    runner.collect(handle)


def test_an_empty_plan_reads_nothing(runner):
    result = runner.collect(runner.dispatch(Plan(step_id=3)))
    assert result.sampled == ()
    assert result.step_id == 3
    assert runner.device.shape.vocab_size == VOCAB


@pytest.mark.parametrize("name", ["prefill", "score", "decode", "exact"])
def test_no_step_gathers_a_weight(name):
    """Tensor-parallel steps move activations and logits between devices, never a matrix of the model."""
    model, mesh = load(tp=2, vocab_size=96)  # divides by tp, so the output matrix is cut
    runner = make(tp=2, num_pages=20)
    device, layout = runner.device, runner.device.layout
    step = jit_functions(DecoderModel(model.spec, choose_ops(layout, mesh), model.layer_loop), layout, mesh, hidden_rows=64)[
        name
    ]
    held = (model.params, device.pool.take(), jax.device_put(new_state(4, 16, 96), device.whole))
    arguments = {
        "prefill": (*held, empty_prefill(runner.shape.prefill[0], 4)),
        "score": (model.params, device.empty_hidden(), empty_score()),
        "decode": (*held, np.full(4, 4, np.int32)),
        "exact": (*held, empty_exact(4)),
    }
    compiled = step.lower(*arguments[name]).compile().as_text()
    gathered = {
        shape for line in compiled.splitlines() if " all-gather(" in line for shape in re.findall(r"\[([\d,]+)\]", line)
    }
    matrices = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(model.params) if leaf.ndim == 2}
    assert gathered
    assert not gathered & matrices
