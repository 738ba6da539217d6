"""Host side of a step: tiles, buckets, admissions."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest

from jdisagg.core.config import CacheConfig, Config, LocalPrefill, ModelConfig, Numerics, SchedulerConfig, TransferConfig
from jdisagg.core.requests import Role, SamplingParams
from jdisagg.engine import updates
from jdisagg.engine.buckets import PrefillBucket, decode_buckets, prefill_buckets
from jdisagg.engine.packing import pack_prefill
from jdisagg.engine.sizing import runner_shape
from jdisagg.engine.state import INT_COLUMNS, PROMPT_BIT
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.spec import KVSpec
from jdisagg.models.sharding import make_mesh
from tests.unit.engine.support import admit, chunk_up, prompt_of


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 5, 16, 100, 256, 1000])
@pytest.mark.parametrize("max_tokens", [1, 16, 64, 100, 512, 8192])
def test_buckets_are_few_and_reach_the_limits(max_num_seqs, max_tokens):
    prefill, decode = prefill_buckets(max_tokens, max_num_seqs), decode_buckets(max_num_seqs)
    assert len(prefill) + len(decode) + 4 <= 16
    assert prefill[-1].num_tokens >= max_tokens
    assert decode[-1] == max_num_seqs
    assert all(bucket.num_tokens % 16 == 0 and 1 <= bucket.num_rows <= max_num_seqs for bucket in prefill)
    assert sorted(set(decode)) == list(decode)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 16, 100])
def test_no_decode_step_has_fewer_rows_than_the_least(max_num_seqs):
    assert min(decode_buckets(max_num_seqs, least=2)) == 2 <= max(max_num_seqs, 2) == decode_buckets(max_num_seqs, least=2)[-1]


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1), ("bfloat16", 2), ("float16", 2)])
def test_one_row_of_16_bits_is_not_decoded_alone_on_a_cpu(dtype, least):
    layout = choose_layout(KVSpec(num_layers=1, num_kv_heads=1, features=4, dtype=dtype), make_mesh(jax.devices(), 1), 16)
    assert runner_shape(Config(), Role.UNIFIED, 64, layout).decode[0] == least


def test_roles_get_the_executables_they_can_need():
    spec = KVSpec(num_layers=1, num_kv_heads=1, features=4, dtype="float32")

    def shape(role, numerics=Numerics.FAST, local=LocalPrefill.ON_FAILURE):
        model, transfer = ModelConfig(numerics=numerics), TransferConfig(local_prefill=local)
        config = Config(model=model, transfer=transfer, cache=CacheConfig(), scheduler=SchedulerConfig())
        return runner_shape(config, role, 64, choose_layout(spec, make_mesh(jax.devices(), 1), 16))

    assert shape(Role.PREFILL).decode == ()
    assert shape(Role.DECODE).prefill
    assert shape(Role.DECODE, local=LocalPrefill.NEVER).prefill == ()
    exact = shape(Role.UNIFIED, Numerics.EXACT)
    assert exact.exact
    assert exact.prefill == exact.decode == ()


def test_every_prompt_token_is_fed_once_at_its_position():
    prompts = {slot: prompt_of(length, seed=slot) for slot, length in enumerate([33, 1, 16, 90])}
    chunks = [chunk for slot, prompt in prompts.items() for chunk in chunk_up(slot, prompt, [len(prompt)], num_top=1)]
    fed: dict[tuple[int, int], int] = {}
    wanted: dict[tuple[int, int], int] = {}
    sampled = []
    for step in pack_prefill(chunks, (PrefillBucket(32, 2), PrefillBucket(128, 2)), dummy_slot=9):
        batch = step.batch
        assert len(batch.token_ids) in (32, 128)
        assert [pairs.shape for pairs in step.to_score] == [(2, 64)] * -(-sum(len(each.rows) for each in step.targets) // 64)
        for index in np.flatnonzero(batch.positions >= 0):
            key = (int(batch.tile_slots[index // 16]), int(batch.positions[index]))
            assert key not in fed
            fed[key] = int(batch.token_ids[index])
        for row, slot in step.samples:
            assert batch.positions[batch.sample_tokens[row]] == len(prompts[slot]) - 1
            sampled.append(slot)
        for targets in step.targets:
            pairs = np.concatenate(step.to_score, axis=1)[:, list(targets.rows)]
            assert tuple(pairs[1]) == targets.token_ids
            for at, token in pairs.T.tolist():
                wanted[int(batch.tile_slots[at // 16]), int(batch.positions[at])] = token
    assert fed == {(slot, position): token for slot, prompt in prompts.items() for position, token in enumerate(prompt)}
    assert sorted(sampled) == [0, 1, 2, 3]
    assert wanted == {(slot, at): token for slot, prompt in prompts.items() for at, token in enumerate(prompt[1:])}


@pytest.mark.parametrize(("num_rows", "sampled"), [(1, [[0], [1], [2]]), (2, [[0, 1], [2]]), (3, [[0, 1, 2]])])
def test_as_many_prompts_end_in_a_step_as_its_bucket_has_rows(num_rows, sampled):
    chunks = [chunk_up(slot, [5, 6, 7], [3])[0] for slot in range(3)]
    steps = list(itertools.islice(pack_prefill(chunks, (PrefillBucket(64, num_rows),), dummy_slot=9), 4))
    assert [[slot for _, slot in step.samples] for step in steps] == sampled


def test_bias_of_what_is_no_token_changes_no_other_token():
    """-1 would be the last one."""
    request = admit(2, (1,), [5], SamplingParams(logit_bias=((-1, 9.0), (3, 2.0), (10, 9.0))))
    ((entries, bias),) = updates.pack_history(request, num_slots=4, vocab_size=10)
    assert {token: added for token, added in zip(entries[1], bias, strict=True) if added} == {3: 2.0}


def test_ends_are_held_back_until_so_many_tokens_follow_the_prompt():
    request = admit(0, (1,), [3, 4], SamplingParams(min_tokens=5, stop_token_ids=(8,)), generated=[6])
    (rows,) = updates.pack_admissions([request], num_slots=6, width=4, vocab_size=10)
    assert rows.ints[0, INT_COLUMNS.index("min_length")] == 7
    assert rows.ints[0, len(INT_COLUMNS) :].tolist()[:3] == [0, 8, 10], "EOS, 8, padding"


def test_history_counts_prompt_and_generated_tokens():
    request = admit(2, (1,), [5, 5, 6], SamplingParams(presence_penalty=1.0, logit_bias=((6, 2.0),)), generated=[6, 7, 7])
    ((entries, bias),) = updates.pack_history(request, num_slots=4, vocab_size=10)
    table, added = np.zeros(10, np.int64), np.zeros(10)
    used = entries[0] == 2
    np.add.at(table, entries[1, used], entries[2, used])
    np.add.at(added, entries[1, used], bias[used])
    assert table.tolist() == [0, 0, 0, 0, 0, PROMPT_BIT, PROMPT_BIT + 1, 2, 0, 0]
    assert added[6] == 2.0
    assert not added[:6].any()


def test_a_long_history_takes_several_updates_and_is_told_in_whole():
    draw, num_tokens = np.random.default_rng(5), 4 * updates.HISTORY_CELLS
    prompt, generated = (draw.integers(0, num_tokens, num_tokens).tolist() for _ in range(2))
    sampling = SamplingParams(repetition_penalty=1.1, logit_bias=tuple((token, token / 2) for token in range(0, num_tokens, 7)))
    request = admit(1, (1,), prompt, sampling, generated=generated)
    steps = list(updates.pack_history(request, num_slots=4, vocab_size=num_tokens))
    assert len(steps) > 4
    table, added = np.zeros(num_tokens, np.int64), np.zeros(num_tokens)
    for entries, bias in steps:
        assert (entries.dtype, entries.shape) == (np.int32, (3, updates.HISTORY_CELLS))
        assert (bias.dtype, bias.shape) == (np.float32, (updates.HISTORY_CELLS,))
        used = entries[0] == 1
        assert set(entries[0][np.logical_not(used)].tolist()) <= {5}, "padding names no slot"
        np.add.at(table, entries[1, used], entries[2, used])
        np.add.at(added, entries[1, used], bias[used])
    wanted = Counter(generated) + Counter(dict.fromkeys(prompt, PROMPT_BIT))
    assert table.tolist() == [wanted[token] for token in range(num_tokens)]
    assert added.tolist() == [0 if token % 7 else token / 2 for token in range(num_tokens)]


def test_admissions_come_in_fixed_sizes_and_padding_names_no_slot():
    steps = list(updates.pack_admissions([admit(i, (1, 2), [3]) for i in range(5)], num_slots=6, width=4, vocab_size=10))
    assert [step.cursor[0].tolist() for step in steps] == [[0, 1, 2, 3], [4, 7, 7, 7]]
    assert steps[0].page_table[1].tolist() == [1, 2, 0, 0]
