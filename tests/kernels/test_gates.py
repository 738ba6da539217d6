"""Gates: the TPU compiler takes every kernel for every chip, leaves the cache in place and needs next to nothing beside it.

The small matrix runs always, all of it with JDISAGG_KERNEL_GATES=full. Chips are compiled for in processes of their own, two
at a time: libtpu is given its environment when it is loaded, and one compilation does not fill two cores.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kernels.compile_gate import ENVIRONMENT, TOPOLOGIES, Case, big_copies, cases, describe

FULL = os.environ.get("JDISAGG_KERNEL_GATES") == "full"
LIMIT_S = 1500 if FULL else 400
MOST_TEMP = 0.05  # of the cache
EXTRA_PLATFORM = platform.system() == "Linux" and platform.machine() == "x86_64"  # libtpu has no other wheels


def compile_for(topology, *extra):
    """Verdicts of one process, by case; its error output when it failed."""
    command = [sys.executable, "-m", "tests.kernels.compile_gate", topology, *(["--full"] if FULL else []), *extra]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{topology}: exit {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    return {verdict["case"]: verdict for verdict in map(json.loads, done.stdout.splitlines())}


def show(verdict):
    """One line of the table."""
    cache, temp = verdict["cache_bytes"], verdict["temp_bytes"]
    aliased = f"{100 * min(verdict['alias_bytes'], cache) / cache:.0f} %"
    figures = f"{verdict['seconds']:6.1f} s  temp {temp / 2**20:7.2f} MiB {100 * temp / cache:6.3f} %  aliased {aliased:>5}"
    return f"{verdict['topology']:12} {verdict['case']:48} {figures}  copies {verdict['copies']}"


def passes(verdict):
    """Cache in place, next to no temporaries, nothing of its size made anew, and a kernel in it."""
    in_place = verdict["alias_bytes"] >= verdict["cache_bytes"]
    small = verdict["temp_bytes"] < MOST_TEMP * verdict["cache_bytes"]
    return in_place and small and verdict["copies"] == 0 and verdict["kernels"] >= 1


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(not EXTRA_PLATFORM, reason="libtpu exists for Linux on x86-64 only")
def test_every_kernel_compiles_for_every_chip_and_copies_no_cache():
    assert importlib.util.find_spec("libtpu"), "libtpu is a test dependency here: pip install -e .[test]"
    with ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(compile_for, TOPOLOGIES))
    verdicts = [verdict for table in tables for verdict in table.values()]
    print("\n" + "\n".join(map(show, verdicts)))
    wanted = {describe(case) for case in cases(FULL)}
    assert all(set(table) == wanted for table in tables)
    assert len(verdicts) == len(TOPOLOGIES) * len(wanted)
    assert not [show(verdict) for verdict in verdicts if not passes(verdict)]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not EXTRA_PLATFORM, reason="libtpu exists for Linux on x86-64 only")
def test_the_gate_sees_a_cache_that_is_copied():
    verdicts = compile_for("v6e:2x2", "--bad")
    assert verdicts
    for verdict in verdicts.values():
        assert not passes(verdict), show(verdict)


def test_copies_are_told_from_views_and_small_change():
    text = """
      %a = bf16[4,1024,8,16,256]{4,3,2,1,0:T(8,128)(2,1)} copy(%p)
      %b = bf16[4,1024,8,16,256]{4,3,2,1,0:T(8,128)(2,1)} bitcast(%p)
      %c = f32[8,128]{1,0:T(8,128)} copy(%q)
      ROOT %d = s8[1073741824]{0} transpose(%r), dimensions={0}
    """
    found = list(big_copies(text, 2**26))
    assert [kind in copy for kind, copy in zip(("copy(", "transpose("), found, strict=True)] == [True, True]


def test_the_matrix_holds_every_kernel_at_both_head_dimensions():
    small = list(cases(False))
    for dim in (64, 128):
        assert {"decode", "prefill", "write", "gather", "scatter"} <= {case.kernel for case in small if case.dim == dim}
    assert {describe(case) for case in small} <= {describe(case) for case in cases(True)}
    assert all(isinstance(case, Case) for case in small)
