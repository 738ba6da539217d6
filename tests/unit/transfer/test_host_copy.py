"""Pieces on their way out of a device's memory."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.transfer import host_copy
from jdisagg.transfer.host_copy import on_host


def test_a_cpu_array_is_not_copied() -> None:
    array = jnp.arange(1024.0)
    assert on_host(array).ctypes.data == np.asarray(array).ctypes.data


def test_through_pinned_memory_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.arange(24.0).reshape(2, 3, 4)
    monkeypatch.setattr(host_copy, "GPU_PLATFORMS", ("cpu",))
    np.testing.assert_array_equal(on_host(array), np.asarray(array))
    assert on_host(array).ctypes.data != np.asarray(array).ctypes.data
