"""Block sizes of the GPU kernel: the rule's bounds."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu_blocks import gpu_blocks_by_rule

SHARED_BYTES = 227 * 2**10  # that one program of a Hopper GPU may take


def sizes(
    *, decode, dim=128, kv_heads=8, group=4, dtype="bfloat16", num_rows=32, num_queries=512, max_keys=8192, products=None
):
    kv = jax.ShapeDtypeStruct((2, 64, 16, kv_heads, 2 * dim), jnp.dtype(dtype))
    q = jax.ShapeDtypeStruct(
        (num_rows if decode else num_queries, kv_heads * group, dim),
        products or (jnp.float32 if dtype == "float32" else jnp.bfloat16),
    )
    return {"kv": kv, "q": q, "decode": decode, "num_rows": num_rows, "max_keys": max_keys}


@pytest.mark.parametrize("decode", [True, False])
def test_the_rule_keeps_to_powers_of_two_that_a_tensor_core_takes_and_to_shared_memory(decode):
    for dim, group, dtype, num_queries in product(
        (64, 128, 256), (1, 4, 7, 64), ("bfloat16", "int8", "float32"), (1, 40, 4096)
    ):
        blocks = gpu_blocks_by_rule(**sizes(decode=decode, dim=dim, group=group, dtype=dtype, num_queries=num_queries))
        for size in (blocks.rows, blocks.keys, blocks.warps):
            assert size & (size - 1) == 0
        assert blocks.rows >= max(16, group)
        assert blocks.keys >= 16
        width = 2 * dim * max(2, jnp.dtype(dtype).itemsize)  # integers are widened before they are multiplied
        assert (blocks.keys * blocks.stages + blocks.rows // 2) * width <= SHARED_BYTES


@pytest.mark.parametrize(("num_rows", "kv_heads"), [(1, 8), (1, 1), (8, 8), (32, 8), (128, 8), (256, 1)])
def test_decode_has_four_programs_or_nearly_for_each_processor_unless_keys_run_out(num_rows, kv_heads):
    blocks = gpu_blocks_by_rule(**sizes(decode=True, num_rows=num_rows, kv_heads=kv_heads, max_keys=32768))
    unsplit = num_rows * kv_heads
    assert blocks.splits in (1, 128) or abs(unsplit * blocks.splits - 4 * 132) <= unsplit / 2
    assert unsplit * (blocks.splits - 1) < 4 * 132


def test_32_rows_of_8_heads_are_split_in_two():
    """51 us a layer in three, 45 in two, at 1,024 tokens on an H200."""
    assert gpu_blocks_by_rule(**sizes(decode=True, num_rows=32, kv_heads=8, max_keys=1536)).splits == 2


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_float32_products_are_small_for_they_live_in_registers(dtype):
    blocks = gpu_blocks_by_rule(**sizes(decode=False, dtype=dtype, products=jnp.float32))
    assert blocks.rows == 32
    assert blocks.keys == 32
    assert (blocks.warps, blocks.stages) == (4, 1)


def test_short_sequences_are_not_split_finer_than_blocks_of_keys():
    blocks = gpu_blocks_by_rule(**sizes(decode=True, num_rows=1, max_keys=200))
    assert blocks.splits == -(-200 // blocks.keys)


def test_prefill_splits_only_what_does_not_fill_the_gpu():
    assert gpu_blocks_by_rule(**sizes(decode=False, num_queries=4096)).splits == 1
    assert gpu_blocks_by_rule(**sizes(decode=False, num_queries=64)).splits == 8
