"""Reading compiled programs: by hand where the text is the point, by XLA:CPU where the compiler is."""

import jax
import jax.numpy as jnp
import pytest

from jdisagg.aot.findings import Precious, collectives, copies, kernels, led_by_host
from jdisagg.aot.hlo import parse

WEIGHTS = frozenset({("bf16", (64, 32))})
TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%fused_transpose (param_0: bf16[64,32]) -> bf16[32,64] {
  %param_0 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %transpose.1 = bf16[32,64]{1,0:T(8,128)(2,1)} transpose(%param_0), dimensions={1,0}
  ROOT %bitcast.1 = bf16[1,32,64]{2,1,0:T(8,128)(2,1)} bitcast(%transpose.1)
}

%fused_product (param_0: bf16[64,32]) -> f32[8,32] {
  %param_0 = bf16[64,32]{1,0} parameter(0)
  %copy.7 = bf16[64,32]{0,1} copy(%param_0)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%copy.7, %copy.7)
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%body (arg: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %arg = (s32[], bf16[8,16]{1,0}) parameter(0)
  %all-reduce.3 = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), channel_id=1, to_apply=%add
  %attention.5 = bf16[8,16]{1,0} custom-call(%y), custom_call_target="tpu_custom_call"
  ROOT %tuple.1 = (s32[], bf16[8,16]{1,0}) tuple(%i, %all-reduce.3)
}

%some (arg: bf16[64,32]) -> bf16[64,32] {
  %all-gather-start.2 = (f32[4], f32[32]) all-gather-start(%z), channel_id=2, dimensions={0}
  ROOT %copy.9 = bf16[64,32]{0,1} copy(%arg)
}

%none (arg: bf16[64,32]) -> bf16[64,32] {
  ROOT %arg = bf16[64,32]{1,0} parameter(0)
}

ENTRY %main (w: bf16[64,32], kv: bf16[2,512]) -> bf16[64,32] {
  %w = bf16[64,32]{1,0} parameter(0)
  %copy-start.1 = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %fusion.1 = bf16[1,32,64]{2,1,0} fusion(%w), kind=kLoop, calls=%fused_transpose
  %fusion.2 = f32[8,32]{1,0} fusion(%w), kind=kOutput, calls=%fused_product
  %copy.2 = bf16[2,512]{0,1} copy(%kv)
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%init), condition=%cond, body=%body
  %conditional.1 = bf16[64,32]{1,0} conditional(%p, %w, %w), branch_computations={%none, %some}
  ROOT %all-reduce.1 = bf16[64,32]{1,0} all-reduce(%conditional.1), channel_id=3, to_apply=%add
}
"""


def test_collectives_in_the_layer_loop_count_once_a_layer_and_those_in_a_branch_stand_apart() -> None:
    found = {(each.kind, each.optional): each for each in collectives(parse(TEXT), trips=10)}
    assert set(found) == {("all-reduce", False), ("all-gather", True)}
    assert found["all-reduce", False].count == 11
    assert found["all-reduce", False].total_bytes == 10 * 8 * 16 * 2 + 64 * 32 * 2
    assert found["all-gather", True].count == 1
    assert found["all-gather", True].largest_bytes == 32 * 4


def test_a_copy_is_what_writes_a_weight_or_the_cache_to_device_memory_again() -> None:
    precious = Precious(weights=WEIGHTS, cache=frozenset({("bf16", 2 * 512 * 2)}))
    found = {copy.instruction: copy for copy in copies(parse(TEXT), precious)}
    # not copy-start.1, which brings a weight onto the chip, nor copy.7, which exists inside a fusion alone
    assert {name: (copy.of, copy.optional) for name, copy in found.items()} == {
        "fusion.1": ("weight", False),
        "copy.2": ("cache", False),
        "copy.9": ("weight", True),
    }


def test_what_may_be_an_activation_counts_when_it_says_that_it_is_a_weight() -> None:
    copied = "ROOT %copy.9 = bf16[64,32]{0,1} copy(%arg)"
    named = TEXT.replace(copied, f'{copied}, metadata={{op_name="params[0]"}}')
    assert named != TEXT
    precious = Precious(weights=WEIGHTS, cache=frozenset(), num_tokens=64)
    assert copies(parse(TEXT), precious) == ()
    assert [copy.instruction for copy in copies(parse(named), precious)] == ["copy.9"]


JOINED = """HloModule jit_exact

%joins (param_0: bf16[64,32], param_1: bf16[64,32]) -> bf16[64,64] {
  %param_0 = bf16[64,32]{1,0} parameter(0)
  %param_1 = bf16[64,32]{1,0} parameter(1)
  ROOT %concatenate.1 = bf16[64,64]{1,0} concatenate(%param_0, %param_1), dimensions={1}
}

%activations (param_2: bf16[8,32], param_3: bf16[8,32]) -> bf16[8,64] {
  %param_2 = bf16[8,32]{1,0} parameter(0)
  %param_3 = bf16[8,32]{1,0} parameter(1)
  ROOT %concatenate.2 = bf16[8,64]{1,0} concatenate(%param_2, %param_3), dimensions={1}
}

%two (param_4: bf16[64,32], param_5: bf16[8,32]) -> (bf16[8,32], bf16[32,64]) {
  %param_4 = bf16[64,32]{1,0} parameter(0)
  %param_5 = bf16[8,32]{1,0} parameter(1)
  %transpose.1 = bf16[32,64]{1,0} transpose(%param_4), dimensions={1,0}
  %add.1 = bf16[8,32]{1,0} add(%param_5, %param_5)
  ROOT %tuple.1 = (bf16[8,32]{1,0}, bf16[32,64]{1,0}) tuple(%add.1, %transpose.1)
}

ENTRY %main (gate: bf16[64,32], up: bf16[64,32], x: bf16[8,32]) -> bf16[8,64] {
  %gate = bf16[64,32]{1,0} parameter(0)
  %up = bf16[64,32]{1,0} parameter(1)
  %x = bf16[8,32]{1,0} parameter(2)
  %fusion.1 = bf16[64,64]{1,0} fusion(%gate, %up), kind=kLoop, calls=%joins
  %fusion.2 = (bf16[8,32]{1,0}, bf16[32,64]{1,0}) fusion(%gate, %x), kind=kLoop, calls=%two
  %concatenate.3 = bf16[65,32]{1,0} concatenate(%gate, %bias), dimensions={0}, metadata={op_name="params['gate']"}
  %concatenate.4 = bf16[2,32]{1,0} concatenate(%bias, %bias), dimensions={0}, metadata={op_name="params['bias']"}
  ROOT %fusion.3 = bf16[8,64]{1,0} fusion(%x, %x), kind=kLoop, calls=%activations
}
"""


def test_weights_are_copied_where_they_are_joined_and_where_they_are_one_result_of_several() -> None:
    found = copies(parse(JOINED), Precious(weights=WEIGHTS, cache=frozenset(), num_tokens=8))
    assert [(copy.of, copy.instruction, copy.shape) for copy in found] == [
        ("weight", "fusion.1", "bf16[64,64]"),
        ("weight", "fusion.2", "bf16[32,64]"),
        ("weight", "concatenate.3", "bf16[65,32]"),
    ]


def test_what_may_be_activations_is_no_weights_that_are_joined() -> None:
    precious = Precious(weights=WEIGHTS, cache=frozenset(), num_tokens=64)
    assert [copy.instruction for copy in copies(parse(JOINED), precious)] == ["concatenate.3"]


def test_scales_are_cache_in_their_own_dtype_alone() -> None:
    cache = frozenset({("s8", 10**6), ("bf16", 2 * 512 * 2), ("f32", 2 * 512 * 2)})
    assert [copy.of for copy in copies(parse(TEXT), Precious(weights=WEIGHTS, cache=cache))].count("cache") == 1
    without = cache - {("bf16", 2 * 512 * 2)}
    assert "cache" not in [copy.of for copy in copies(parse(TEXT), Precious(weights=WEIGHTS, cache=without))]


def test_kernels_are_named_without_their_numbers() -> None:
    assert kernels(parse(TEXT), trips=10) == {"attention": 10}


def test_a_gpu_s_host_leads_loops_and_sorts_also_those_of_a_branch() -> None:
    assert led_by_host(parse(TEXT)) == ("while.1",)
    gathered = "%all-gather-start.2 = (f32[4], f32[32]) all-gather-start(%z), channel_id=2, dimensions={0}"
    for sort in ("sort(%z), dimensions={0}", 'custom-call(%z), custom_call_target="__cub$DeviceRadixSort"'):
        sorts = TEXT.replace(gathered, f"%s.1 = f32[4] {sort}")
        assert sorts != TEXT
        assert set(led_by_host(parse(sorts))) == {"while.1", "s.1"}
    fused = TEXT.replace(
        "ROOT %dot.1 = f32[8,32]{1,0} dot(%copy.7, %copy.7)", "ROOT %sort.1 = f32[8,32]{1,0} sort(%copy.7), dimensions={1}"
    )
    assert fused != TEXT
    assert led_by_host(parse(fused)) == ("fusion.2", "while.1")


@pytest.mark.parametrize("donated", [True, False])
def test_the_compiler_copies_a_cache_that_is_not_donated(*, donated: bool) -> None:
    cache = jax.ShapeDtypeStruct((4, 256, 64), jnp.float32)
    write = jax.jit(lambda kv, row: kv.at[1, 3].set(row), donate_argnums=0 if donated else ())
    compiled = write.lower(cache, jax.ShapeDtypeStruct((64,), jnp.float32)).compile()
    module = parse(compiled.as_text())
    found = copies(module, Precious(weights=frozenset(), cache=frozenset({("f32", 4 * 256 * 64 * 4)})))
    assert [copy.of for copy in found] == ([] if donated else ["cache"])
    assert module.aliased_bytes == (4 * 256 * 64 * 4 if donated else 0)


def test_the_compiler_copies_a_weight_that_is_used_the_other_way_round() -> None:
    weight, row = jax.ShapeDtypeStruct((96, 40), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.float32)
    compiled = jax.jit(lambda w, x: (w.T.copy(), x + 1)).lower(weight, row).compile()
    precious = Precious(weights=frozenset({("f32", (96, 40))}), cache=frozenset())
    found = copies(parse(compiled.as_text()), precious)
    assert len(found) in (1, 2), "with jax 0.11 XLA:CPU transposes into one layout, and copies that into the other"
    assert {(copy.of, copy.num_bytes, copy.optional) for copy in found} == {("weight", 96 * 40 * 4, False)}
