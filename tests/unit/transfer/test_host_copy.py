"""Pieces on their way out of a device's memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.models.sharding import make_mesh
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


@pytest.mark.parametrize(("spec", "copies"), [(PartitionSpec(), 1), (PartitionSpec("tp"), 4)], ids=["replicated", "sharded"])
def test_what_all_devices_hold_is_copied_once(monkeypatch: pytest.MonkeyPatch, spec: PartitionSpec, copies: int) -> None:
    """With fewer KV heads than shards a piece lies on every device: memory of the host would hold it as often."""
    mesh = make_mesh(jax.devices("cpu"), 4)
    array = jax.device_put(np.arange(24.0).reshape(4, 6), NamedSharding(mesh, spec))
    put, pinned = jax.device_put, list[jax.Array]()

    def note(*arguments: Any) -> jax.Array:
        pinned.append(put(*arguments))
        return pinned[-1]

    monkeypatch.setattr(host_copy, "GPU_PLATFORMS", ("cpu",))
    monkeypatch.setattr(jax, "device_put", note)
    np.testing.assert_array_equal(on_host(array), np.asarray(array))
    assert [len(one.addressable_shards) for one in pinned] == [copies]
