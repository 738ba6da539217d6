"""What engines of one process leave behind in it: its garbage collector is whoever's."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest

from jdisagg.batch.local import searched_seldom


@pytest.mark.parametrize("first", [0, 1])
def test_two_engines_leave_the_process_searched_as_it_was_whichever_ends_first(first: int) -> None:
    thresholds, engines = gc.get_threshold(), (ExitStack(), ExitStack())
    try:
        for engine in engines:
            engine.enter_context(searched_seldom())
        assert gc.get_threshold() != thresholds
        engines[first].close()
        engines[1 - first].close()
        assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)
    finally:
        gc.set_threshold(*thresholds)
