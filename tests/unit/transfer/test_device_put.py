"""Between meshes of one process: nothing compiles after warm-up, and the copy is one."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from jdisagg.kv.group import KVGroup
from jdisagg.transfer.base import Published
from jdisagg.transfer.device_put import DevicePutPublisher, device_put_fetcher
from tests.unit.transfer.rig import CHUNK_TOKENS, TARGET, H, Rig, piece, sharding, tokens


@pytest.mark.parametrize(("devices_p", "first_d", "devices_d"), [(1, 4, 4), (2, 4, 1), (1, 0, 1), (2, 0, 2), (4, 4, 2)])
def test_any_two_meshes_byte_exact_without_compiling_after_warm_up(
    devices_p: int, first_d: int, devices_d: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig("device_put")
    target = replace(TARGET, sharding=sharding(first_d, devices_d))
    rig.publisher = publisher = DevicePutPublisher(rig.events.put)
    example = KVGroup(piece(tokens(CHUNK_TOKENS), heads_on=devices_p).data)
    rig.fetcher = device_put_fetcher(publisher, target, rig.events.put, example)
    sent = tokens(5, seed=1)
    source = piece(sent, heads_on=devices_p)
    jax.config.update("jax_log_compiles", True)  # on every thread, unlike the context manager
    try:
        with caplog.at_level(logging.WARNING):
            got = rig.arrived(rig.published("k", source)).piece.data
    finally:
        jax.config.update("jax_log_compiles", False)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
    assert got.sharding == sharding(first_d, devices_d)
    rig.publisher.discard("k")
    source.data.delete()
    assert np.array_equal(np.asarray(got)[:, :5], sent), "it does not share the source's memory"
    rig.close()


def test_a_published_piece_stays_on_the_device_and_says_so() -> None:
    rig = Rig("device_put").start()
    rig.publisher.publish(H, "k", piece(tokens(5)))
    event = rig.event()
    assert isinstance(event, Published)
    assert event.stays_tokens == CHUNK_TOKENS, "whole"
    rig.close()


def test_what_is_discarded_leaves_the_device_while_steps_behind_it_are_waited_for() -> None:
    rig = Rig("device_put").start()
    publisher = rig.publisher
    assert isinstance(publisher, DevicePutPublisher)
    rig.published("k", piece(tokens(5)))
    is_through = threading.Event()

    def step() -> None:
        is_through.wait(30.0)

    publisher._lane.submit(step)
    assert publisher.get("k") is not None
    publisher.discard("k")
    assert publisher.get("k") is None
    is_through.set()
    rig.close()
