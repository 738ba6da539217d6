"""What an `exact` worker computes, tried before READY: the same for whoever gives the same streams, and for nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jdisagg.core.config import LEAST_MODEL_LEN, Numerics
from jdisagg.engine.bits import compute_bits
from jdisagg.engine.compiles import CompileCounter
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.warmup import warm_up
from jdisagg.sched.plan import PageTable
from jdisagg.transfer.base import Piece
from tests.unit.engine.support import Driver, make, prompt_of, tokens


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make(numerics=Numerics.EXACT)


@pytest.fixture(scope="module")
def bits(runner: ModelRunner) -> str:
    return compute_bits(runner)


@pytest.mark.covers("I-6")
def test_sizes_that_no_token_depends_on_do_not_show(bits: str) -> None:
    other = make(
        numerics=Numerics.EXACT, page_size=16, num_pages=20, max_num_seqs=7, max_num_batched_tokens=32, chunk_tokens=20
    )
    assert compute_bits(other) == bits


@pytest.mark.parametrize("changes", [{"tp": 2}, {"kv_dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_what_rounds_elsewhere_shows(bits: str, changes: dict[str, Any]) -> None:
    other = compute_bits(make(numerics=Numerics.EXACT, **changes))
    assert other != bits
    assert other.partition("-")[0] == bits.partition("-")[0]


def test_a_pool_shorter_than_the_probe_is_no_reason_not_to_start() -> None:
    runner = make(numerics=Numerics.EXACT, page_size=1, num_pages=LEAST_MODEL_LEN + 1, max_model_len=None)
    assert compute_bits(runner).startswith(f"a{LEAST_MODEL_LEN - 1}-")


@pytest.mark.parametrize("part", ["embed_tokens", "layers", "lm_head"])
def test_one_bit_in_one_number_of_what_is_computed_shows(
    bits: str, part: str, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an instruction that rounds once instead of twice leaves it: in every layer, and behind the last one."""
    params = dict(runner.device._params)  # pyright: ignore[reportPrivateUsage]
    params[part] = jax.tree.map(_nudged, params[part])
    with monkeypatch.context() as patch:
        patch.setattr(runner.device, "_params", params)
        assert compute_bits(runner) != bits
    assert compute_bits(runner) == bits


def test_one_number_of_kv_alone_shows(bits: str, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds apart in one layer may be rounded away behind it, for this prompt."""
    export = runner.export_tokens

    def exported(page_table: PageTable, begin: int, end: int) -> Piece:
        piece = export(page_table, begin, end)
        data = np.array(piece.data)
        if begin <= 40 < end:
            data[1, 40 - begin, 1, 3] = np.nextafter(data[1, 40 - begin, 1, 3], np.float32(9))
        return replace(piece, data=jax.device_put(data, piece.data.sharding))

    monkeypatch.setattr(runner, "export_tokens", exported)
    assert compute_bits(runner) != bits


def _nudged(x: jax.Array) -> jax.Array:
    return jax.device_put(np.nextafter(np.asarray(x), np.float32(np.inf)), x.sharding)


def test_trying_compiles_nothing_after_warm_up_and_leaves_a_runner_as_it_was(bits: str) -> None:
    prompt, fresh, tried = prompt_of(21), make(numerics=Numerics.EXACT), make(numerics=Numerics.EXACT)
    warm_up(tried)
    compiles = CompileCounter()
    before = compiles.count
    assert [compute_bits(tried) for _ in range(2)] == [bits] * 2
    assert compiles.count == before
    wanted = tokens(Driver(fresh).generate(0, range(1, 17), prompt))
    assert tokens(Driver(tried).generate(0, range(1, 17), prompt)) == wanted
