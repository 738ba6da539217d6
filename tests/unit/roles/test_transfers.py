"""The share of the transfer that nobody waited for."""

from __future__ import annotations

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.roles.transfers import HiddenTransfers


def hidden(computed_s: float | None, *arrivals: tuple[float, float]) -> float:
    """Hidden seconds of pieces (seconds, now_s) around the first token at `computed_s`."""
    metrics = Metrics()
    transfers = HiddenTransfers(metrics)
    told = False
    for seconds, now_s in arrivals:
        if computed_s is not None and now_s >= computed_s and not told:
            transfers.computed("r", computed_s)
            transfers.computed("r", computed_s + 9)  # said again by a later stream: it counts from the first time
            told = True
        transfers.arrived("r", seconds, now_s)
    transfers.forget("r")
    transfers.forget("r")
    return metrics.transfer_hidden_seconds._value.get()


def test_pieces_are_hidden_as_far_as_the_first_token_was_not_known() -> None:
    assert hidden(None, (0.5, 1.0), (0.25, 2.0)) == pytest.approx(0.75)
    assert hidden(3.0, (0.5, 1.0), (1.0, 3.25), (0.5, 4.0)) == pytest.approx(0.5 + 0.75)
    assert hidden(1.0, (0.5, 2.0)) == 0
