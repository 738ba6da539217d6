"""Block sizes: the rule, measured sizes from data files, and the script that finds them."""

import argparse
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import tune_kernels
from jax.experimental.pallas import tpu as pltpu
from tune_kernels import Problem, measure

from pallas_kernels.blocks import Blocks, BlockTable, blocks_by_rule, file_stem, tuned

SHAPE = {"kv_heads": 2, "query_heads": 4, "dim": 8, "dtype": "float32", "page_size": 8}


def arrays(*, kv_heads, heads, dim=128, dtype=jnp.bfloat16, page_size=16, queries=2048):
    kv = jax.ShapeDtypeStruct((2, 64, kv_heads, page_size, 2 * dim), dtype)
    return {"kv": kv, "q": jax.ShapeDtypeStruct((queries, heads, dim), jnp.bfloat16)}


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
@pytest.mark.parametrize("page_size", [16, 128, 512])
def test_a_block_of_keys_is_a_megabyte_within_its_limits(kv_heads, dtype, page_size):
    shape = arrays(kv_heads=kv_heads, heads=32, dtype=dtype, page_size=page_size)
    blocks = blocks_by_rule(**shape, decode=True, max_pages=1000)
    assert blocks.queries == 1
    keys = blocks.pages * page_size
    assert 128 <= keys <= 1024
    assert keys * kv_heads * 256 * jnp.dtype(dtype).itemsize <= 2**20 or keys == max(128, page_size)


def test_a_block_is_no_longer_than_the_page_table_and_the_batch():
    shape = arrays(kv_heads=1, heads=8, queries=40)
    assert blocks_by_rule(**shape, decode=False, max_pages=3) == Blocks(64, 3)


@pytest.mark.parametrize(("kv_heads", "heads", "queries"), [(8, 32, 128), (8, 8, 128), (1, 8, 64), (1, 64, 8), (1, 128, 8)])
def test_a_block_of_queries_fills_the_multiplier(kv_heads, heads, queries):
    shape = arrays(kv_heads=kv_heads, heads=heads)
    assert blocks_by_rule(**shape, decode=False, max_pages=1000).queries == queries


def options(**changed):
    fields = {"kv_heads": 2, "query_heads": 4, "head_dim": 8, "kv_dtype": "float32", "page_size": 8}
    return argparse.Namespace(**{**fields, "context": 64, "batch": 4, "prefill_tokens": 32, **changed})


def test_the_fastest_candidate_is_written_and_used(tmp_path):
    path = tmp_path / "tuned" / "chip.json"
    wanted = {True: Blocks(1, 8), False: Blocks(32, 8)}
    for page_size in (8, 16):  # the second leaves what the first has found
        found = [
            tune_kernels.best(problem, lambda problem, blocks: None if blocks.queries == 16 else 1.0 - blocks.pages / 100)
            for problem in tune_kernels.problems(options(page_size=page_size))
        ]
        tune_kernels.merge(path, "Chip 1", found)
    table = BlockTable.read(path)
    assert len(table.measured) == 4
    shape = arrays(kv_heads=2, heads=4, dim=8, dtype=jnp.float32, page_size=8)
    for decode, blocks in wanted.items():
        assert table.blocks(**shape, decode=decode, max_pages=100) == blocks
        assert table.blocks(**shape, decode=decode, max_pages=2) == Blocks(blocks.queries, 2)
    other = arrays(kv_heads=4, heads=4)
    assert table.blocks(**other, decode=True, max_pages=100) == blocks_by_rule(**other, decode=True, max_pages=100)


def test_a_damaged_data_file_is_refused_by_name(tmp_path):
    path = tmp_path / "chip.json"
    path.write_text('{"blocks": [{"decode": true}]}')
    with pytest.raises(ValueError, match=r"chip.json: blocks\[0\].*tune_kernels"):
        BlockTable.read(path)


def test_a_chip_that_nobody_measured_has_no_data_file():
    assert file_stem("TPU v6 lite") == "tpu_v6_lite"
    assert tuned("no such chip") is None


def test_without_a_tpu_the_script_says_so(capsys):
    assert tune_kernels.main(["--query-heads", "8", "--kv-heads", "2", "--head-dim", "128"]) == tune_kernels.NO_TPU
    assert "wanted tpu" in capsys.readouterr().err


def test_pages_that_the_kernel_refuses_are_told_and_no_file_is_written(tmp_path, monkeypatch, capsys):
    """The default page size, for int8."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="tpu", device_kind="Chip 1")])
    shape = ["--query-heads", "2", "--kv-heads", "1", "--head-dim", "64", "--batch", "1", "--context", "16"]
    arguments = [*shape, "--kv-dtype", "int8", "--out", str(tmp_path / "chip.json")]
    assert tune_kernels.main(arguments) == tune_kernels.ALL_REFUSED
    said = capsys.readouterr()
    assert "refused: paged attention for TPU: pages of 16 tokens of int8, wanted a multiple of 128" in said.out
    assert "nothing is written" in said.err
    assert not list(tmp_path.iterdir())


def test_what_is_measured_is_the_kernel():
    problem = Problem(decode=True, rows=2, queries=1, context=16, **SHAPE)
    assert [blocks.pages for blocks in problem.candidates()] == [2]
    assert measure(problem, Blocks(1, 1), runs=1, interpret=pltpu.InterpretParams()) > 0
