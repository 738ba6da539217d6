"""Faults planted in the TPU attention kernel, whose functions are replaced: values or the race detector show every one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_kit.paged_rows import PagedRows
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_attention, tpu_copies
from pallas_kernels.rows import Kind
from pallas_kernels.work import visible
from tests.kernels.test_attention import DECODE, PREFILL, SHAPES, run

RAISED_RACE = "RACE DETECTED"  # from jax 0.12 on; before, it was printed


def no_wait(wait, use):
    use()


def late_wait(wait, use):
    use()
    wait()


entry = tpu_copies._entry
FAULTS = {  # the function of a module that is replaced, and by what
    "no wait": (tpu_attention, "arrive", no_wait),
    "late wait": (tpu_attention, "arrive", late_wait),
    "late wait for a page table": (tpu_copies, "arrive", late_wait),
    "next page": (tpu_copies, "_entry", lambda *of: jnp.minimum(entry(*of) + 1, 4)),
    "page before": (tpu_copies, "_entry", lambda *of: jnp.maximum(entry(*of) - 1, 0)),
    "values of masked keys": (tpu_attention, "_clean", lambda values, seen: values),
    "sees one key too many": (tpu_attention, "visible", lambda distance, window: visible(distance + 1, window and window + 1)),
    "window too wide": (tpu_attention, "visible", lambda distance, window: visible(distance, window and window + 1)),
    "window too narrow": (tpu_attention, "visible", lambda distance, window: visible(distance, window and window - 1)),
}


def verdict(capfd, *, kind, rows, window=5):
    """(values are right, the detector saw a race)."""
    paged = PagedRows(rows, SHAPES["gqa"], np.float32)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    try:
        out, wanted = run(paged, window=window, kind=kind, implementation="tpu", interpret=interpret)
    except jax.errors.JaxRuntimeError as error:
        if RAISED_RACE in str(error):
            return True, True
        if "out-of-bounds" not in str(error).lower():  # a table that is not there yet names pages that do not exist
            raise
        return False, False
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return np.allclose(out, wanted, atol=2e-5), "race" in capfd.readouterr().out.lower()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *[(fault, Kind.DECODE) for fault in FAULTS],
        *[(fault, Kind.PREFILL) for fault in ("no wait", "next page", "values of masked keys", "window too wide")],
    ],
)
def test_a_planted_fault_is_caught(fault, kind, capfd, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    right, raced = verdict(capfd, kind=kind, rows=DECODE if kind is Kind.DECODE else PREFILL)
    assert not right or (raced and "wait" in fault)
