"""Faults planted in the TPU attention kernel through its replaceable parts: values or the race detector show every one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rows import Kind
from pallas_kernels.tpu_attention import Parts
from tests.kernels.pages import PagedRows
from tests.kernels.test_attention import DECODE, PREFILL, SHAPES, run

SOUND = Parts()
RAISED_RACE = "RACE DETECTED"  # from jax 0.12 on; before, it was printed


def no_wait(wait, use):
    use()


def late_wait(wait, use):
    use()
    wait()


FAULTS = {
    "no wait": {"arrive": no_wait},
    "late wait": {"arrive": late_wait},
    "late wait for a page table": {"table_arrives": late_wait},
    "next page": {"entry": lambda index: jnp.minimum(index + 1, 4)},
    "page before": {"entry": lambda index: jnp.maximum(index - 1, 0)},
    "values of masked keys": {"clean": lambda values, seen: values},
    "sees one key too many": {
        "visible": lambda distance, window: SOUND.visible(distance + 1, None if window is None else window + 1)
    },
    "window too wide": {"visible": lambda distance, window: SOUND.visible(distance, window and window + 1)},
    "window too narrow": {"visible": lambda distance, window: SOUND.visible(distance, window and window - 1)},
}


def verdict(parts, capfd, *, kind, rows, window=5):
    """(values are right, the detector saw a race)."""
    paged = PagedRows(rows, SHAPES["gqa"], np.float32)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    try:
        out, wanted = run(paged, window=window, kind=kind, implementation="tpu", interpret=interpret, parts=parts)
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
def test_a_planted_fault_is_caught(fault, kind, capfd):
    rows = DECODE if kind is Kind.DECODE else PREFILL
    right, raced = verdict(dataclasses.replace(SOUND, **FAULTS[fault]), capfd, kind=kind, rows=rows)
    assert not right or (raced and "wait" in fault)
