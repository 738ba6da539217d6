"""A decode worker on one core: XLA:CPU begins nothing else while steps follow each other without a pause, so pieces have
to reach the device without its help."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jdisagg.kv.group import KVGroup
from jdisagg.models.sharding import make_mesh
from jdisagg.transfer.buffers import ALIGN_BYTES, aligned
from jdisagg.transfer.target import PieceTarget

LIMIT_S = 300.0
BUSY = """
import os, threading, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, jax.numpy as jnp, numpy as np
from jdisagg.kv.group import KVGroup
from jdisagg.transfer.target import PieceTarget
x = jnp.ones((1400, 1400))
step = jax.jit(lambda a: jnp.tanh(jnp.tanh(a @ x) @ x))
done, count = threading.Event(), 0
def decode():
    global count
    state, before = step(x), None
    while not done.is_set():
        state, before = step(state), state  # one step ahead, as the engine is
        jax.block_until_ready(before)
        count += 1
thread = threading.Thread(target=decode)
thread.start()
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = PieceTarget(sharding=sharding, dtype="float32", chunk_tokens=64, num_layers=4, num_kv_heads=4, features=128)
memory = np.ones(4 * 48 * 4 * 128 + 4, np.float32)
begin = 4 if memory.ctypes.data % 64 == 0 else 0
short = memory[begin : begin + 4 * 48 * 4 * 128].reshape(4, 48, 4, 128)  # unaligned, and shorter than a chunk
while count < 5:
    time.sleep(0.01)
before = count
for _ in range(5):
    target.place(KVGroup(short))
    target.place(KVGroup(target._padded(short)))
print("placed beside", count - before, "steps", flush=True)
os._exit(0)
"""


def test_pieces_are_placed_while_steps_keep_the_only_core_busy() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", BUSY], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert "placed beside" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("shift", [0, 1, 16])
def test_an_array_is_aligned_and_copied_only_if_it_was_not(shift: int) -> None:
    memory = np.arange(4096, dtype=np.float32)
    begin = -memory.ctypes.data % ALIGN_BYTES // 4 + shift
    array = memory[begin : begin + 1024].reshape(4, 256)
    found = aligned(array)
    assert found.ctypes.data % ALIGN_BYTES == 0
    assert np.array_equal(found, array)
    assert (found is array) == (array.ctypes.data % ALIGN_BYTES == 0)
    assert aligned(array[:, ::2]).flags.c_contiguous


@pytest.mark.parametrize("tp", [1, 2])
def test_every_shard_of_a_piece_is_placed_without_a_copy_by_the_device(tp: int) -> None:
    mesh = make_mesh(jax.devices(), tp)
    sharding = SingleDeviceSharding(jax.devices()[0]) if tp == 1 else NamedSharding(mesh, PartitionSpec(None, None, "tp"))
    target = PieceTarget(sharding=sharding, dtype="float32", chunk_tokens=8, num_layers=2, num_kv_heads=4, features=16)
    rows = np.random.default_rng(0).standard_normal((2, 8, 4, 16)).astype(np.float32)
    placed = target.place(KVGroup(rows)).data
    assert placed.sharding == sharding
    assert np.array_equal(np.asarray(placed), rows)
    assert [shard.data.unsafe_buffer_pointer() % ALIGN_BYTES for shard in placed.addressable_shards] == [0] * tp
