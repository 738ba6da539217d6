"""What a batch says on stderr, and how far it is: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from jdisagg.core.outlet import Outlet

REPORT_EVERY_S = 30.0
_REDRAW_EVERY_S = 1.0
_SMOOTHING = 0.05  # of the bar's rate: about its last twenty redraws
OnProgress = Callable[[int, int], object]  # (finished lines, how many of them failed)


def say(text: str) -> None:
    """One line. The disk behind stderr may be full, or nobody there to read it: the batch goes on all the same."""
    with suppress(OSError):
        Outlet(sys.stderr).write(f"jdisagg.batch: {text}\n")


@contextmanager
def shown(total: int, done: int, failed: int, *, quiet: bool) -> Iterator[OnProgress]:
    """What is to be told when more of `total` lines are finished; `done` of them were before, `failed` of these badly."""
    if quiet:
        yield lambda done, failed: None
    elif sys.stderr.isatty():
        with logging_redirect_tqdm(), _bar(total, done, failed) as bar:
            yield bar
    else:
        yield Reports(total, done, failed)


@contextmanager
def _bar(total: int, done: int, failed: int) -> Iterator[OnProgress]:
    with tqdm(total=total, initial=done, unit="req", mininterval=_REDRAW_EVERY_S, smoothing=_SMOOTHING) as bar:
        if failed:
            bar.set_postfix_str(f"{failed} failed")

        def update(done: int, failed: int) -> None:
            if failed:
                bar.set_postfix_str(f"{failed} failed", refresh=False)
            bar.update(done - bar.n)

        yield update


class Reports:
    """Lines for a file: how much, how fast since the line before, how long at that rate."""

    def __init__(self, total: int, done: int, failed: int) -> None:
        """`done` of `total` lines were finished by former runs, `failed` of them badly."""
        self._total = total
        self._told = done
        self._told_s = monotonic()
        if done:
            say(f"{done} of {total} were done before, {failed} failed")

    def __call__(self, done: int, failed: int) -> None:
        """So many are finished now."""
        now_s = monotonic()
        if now_s - self._told_s < REPORT_EVERY_S:
            return
        rate = (done - self._told) / (now_s - self._told_s)
        self._told, self._told_s = done, now_s
        share, left = done / self._total, tqdm.format_interval((self._total - done) / rate)
        say(f"{done} of {self._total} ({share:.0%}), {failed} failed; {rate:.3g} requests/s, {left} left")
