"""Gates of the GPU kernels: what XLA is given, and what the compiler for an H200 makes of it, where that is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.kernels.compile_gate import describe
from tests.kernels.gpu_gate import bad_cases, cache_bytes, cases, kernel_calls, large_results, lower
from tests.kernels.test_gates import FULL, LIMIT_S, passes, show

ATTENTION = ("decode", "prefill", "mixed")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # jax 0.11
MOVES = ("write", "gather", "scatter")  # XLA's own
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="the compiler for an H200 is not installed: jax-cuda13-plugin and jax-cuda13-pjrt of jax's version",
)


def lowered(case):
    try:
        return lower(case)
    except RuntimeError as error:
        if "Triton compilation handler" not in str(error):
            raise
        pytest.skip("this jax compiles for Triton while it lowers, and has no compiler for it")


@pytest.mark.parametrize("case", list(cases(FULL)), ids=describe)
def test_pallas_lowers_every_gpu_kernel_and_nothing_beside_it_touches_the_cache(case):
    text = lowered(case)
    assert kernel_calls(text) == {"mixed": 2, **dict.fromkeys(MOVES, 0)}.get(case.kernel, 1)
    assert "tf.aliasing_output" in text
    found = large_results(text, cache_bytes(case) // 4)
    assert [name for name in found if name != "scatter"] == []
    assert len(found) <= (case.kernel in ("write", "scatter"))


def test_the_lowered_gate_sees_a_cache_that_is_turned_around():
    (case,) = bad_cases()
    assert large_results(lowered(case), cache_bytes(case) // 4) == ["transpose"]


def test_a_decode_of_few_rows_fills_the_gpu_and_heads_lie_side_by_side():
    case = next(case for case in cases(False) if case.kernel == "decode" and case.rows == 1)
    text = lowered(case)
    if "grid_x" not in text:
        pytest.skip("this jax packs the grid into the compiled kernel")
    grid = [int(text.split(f"grid_{axis} = ")[1].split(" ")[0]) for axis in "xyz"]
    assert grid[0] == case.kv_heads
    assert grid[2] == case.rows
    assert 64 <= grid[1] <= 128


def compile_h200(*options):
    command = [sys.executable, "-m", "tests.kernels.gpu_gate", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_cuda
@pytest.mark.timeout(LIMIT_S + 60)
def test_every_gpu_kernel_compiles_for_an_h200_and_copies_no_cache():
    verdicts = compile_h200(*(["--full"] if FULL else []))
    print("\n" + "\n".join(map(show, verdicts)))
    assert [verdict["case"] for verdict in verdicts] == [describe(case) for case in cases(FULL)]
    for verdict in verdicts:
        of_kernel = verdict["case"].startswith(ATTENTION)
        assert passes(verdict if of_kernel else {**verdict, "kernels": 1}), show(verdict)


@needs_cuda
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_gate_sees_a_cache_that_is_copied():
    verdicts = compile_h200("--bad")
    assert verdicts
    assert not any(map(passes, verdicts))


def test_the_matrix_holds_every_kernel_at_both_head_dimensions():
    small = list(cases(False))
    assert {"decode", "prefill", "mixed", *MOVES} == {case.kernel for case in small}
    assert {case.dim for case in small if case.kernel == "decode"} == {64, 128}
    assert {describe(case) for case in small} <= {describe(case) for case in cases(True)}
