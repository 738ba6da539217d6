"""One thread and its queue: what raises, what hangs, and what a job held."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from jdisagg.transfer.lanes import Lane
from tests.unit.transfer.lane_kit import assert_set, threads_called
from tests.unit.waiting import until


@pytest.mark.covers("X07")
def test_a_job_that_raises_is_in_the_log_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    lane, ran = Lane("lane"), threading.Event()

    def freeing() -> None:
        raise OSError("no memory for the file's end")

    lane.submit(freeing)
    lane.submit(ran.set)
    assert ran.wait(30.0)
    lane.stop()
    lane.join(60.0)
    assert "no memory" in caplog.text
    assert [record.getMessage() for record in caplog.records] == ["transfer thread lane"]


def test_a_thread_that_hangs_holds_up_no_end_and_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lane, stuck = Lane("lane-7"), threading.Event()
    lane.submit(lambda: assert_set(stuck))
    lane.stop()
    lane.join(0.05)
    assert [record.getMessage() for record in caplog.records] == ["transfer thread lane-7 did not end within 0.1 s"]
    assert all(thread.daemon for thread in threads_called("lane-7")), "nor the process's"
    stuck.set()
    until(lambda: not threads_called("lane-7"), "it ends when it can")


def test_what_a_job_held_is_free_while_the_lane_waits_for_the_next() -> None:
    lane, ran, piece = Lane("test"), threading.Event(), np.zeros(4)
    held = weakref.ref(piece)
    lane.submit(lambda piece=piece: ran.set())
    del piece
    assert ran.wait(30.0)
    until(lambda: held() is None, "the job is over")
    lane.stop()
