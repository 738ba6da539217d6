from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.models.host_parts import HostParts, slabs
from jdisagg.models.sharding import make_mesh


@pytest.mark.parametrize("axes", [("tp", None), (None, "tp"), (None, None)])
@pytest.mark.parametrize("extent", [(3, 5), (8, 2), (100, 100)])
def test_slabs_reach_every_part_once(axes: tuple[str | None, ...], extent: tuple[int, int]) -> None:
    values = np.arange(8 * 12, dtype=np.float64).reshape(8, 12) + 1
    parts = HostParts(values.shape, NamedSharding(make_mesh(jax.devices(), 4), PartitionSpec(*axes)), "float32")
    seen = np.zeros(values.shape, np.int32)
    for slab in slabs(values.shape, extent):
        seen[slab] += 1
        parts.fill(slab, values[slab])
    assert (seen == 1).all()
    array = parts.placed()
    assert array.dtype == np.float32
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def test_a_cpu_device_takes_its_part_over_and_equal_parts_are_one() -> None:
    sharding = NamedSharding(make_mesh(jax.devices(), 4), PartitionSpec())
    parts = HostParts((1024,), sharding, "bfloat16")
    parts.fill((slice(0, 1024),), np.ones(1024, np.float32))
    pointers = {shard.data.unsafe_buffer_pointer() for shard in parts.placed().addressable_shards}
    assert len(pointers) == 1


@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("value", [65536.0, -1e30])
def test_a_weight_that_float16_cannot_hold_is_refused(stored: str, value: float) -> None:
    values = np.full(8, 65504.0, np.float32)
    values[5] = value
    sharding = NamedSharding(make_mesh(jax.devices(), 1), PartitionSpec())
    with pytest.raises(OverflowError, match="values beyond 65504, the largest that float16 holds"):
        HostParts((8,), sharding, "float16").fill((slice(0, 8),), values.astype(stored))
    HostParts((8,), sharding, "bfloat16").fill((slice(0, 8),), values.astype(stored))


def test_a_weight_that_is_infinite_in_the_file_stays_so() -> None:
    parts = HostParts((2,), NamedSharding(make_mesh(jax.devices(), 1), PartitionSpec()), "float16")
    parts.fill((slice(0, 2),), np.array([np.inf, 1e-30], np.float32))
    assert np.asarray(parts.placed()).tolist() == [np.inf, 0.0]
