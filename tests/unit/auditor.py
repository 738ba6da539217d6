"""What a thread that must not wait asks of the world outside the process, and which waits it begins."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

OUTSIDE = ("open", "socket.", "subprocess.", "os.", "shutil.", "fcntl.", "signal.pthread_kill", "import")
WAITS: tuple[tuple[Any, str], ...] = (
    (threading.Condition, "wait"),  # Event, Barrier, queue.Queue and Semaphore wait by it
    (threading.Thread, "join"),
    (Future, "result"),
)
SLEEP_S = 0.0002  # asked for; less is a yield


class Auditor:
    """Notes this, for one thread at a time and for as long as it is told to. Held locks are not seen."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._watched: int | None = None
        sys.addaudithook(self._audit)  # stays for the life of the process

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._watched == threading.get_ident() and event.startswith(OUTSIDE):
            self.seen[f"{event} {arguments[:1]}"] += 1

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See waits, too."""
        for owner, name in WAITS:
            monkeypatch.setattr(owner, name, self._noted(f"{owner.__name__}.{name}", getattr(owner, name)))
        sleep, sleeper = time.sleep, self._sleeper(time.sleep)
        for module in list(sys.modules.values()):  # some have it by its name
            if getattr(module, "sleep", None) is sleep:
                monkeypatch.setattr(module, "sleep", sleeper)
        start = threading.Thread.start  # waits until the new thread runs

        def begun(thread: threading.Thread) -> None:
            if self._watched != threading.get_ident():
                return start(thread)
            self._watched = None
            start(thread)
            self._watched = threading.get_ident()

        monkeypatch.setattr(threading.Thread, "start", begun)

    def _sleeper(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        def sleeper(seconds: float) -> None:
            if self._watched == threading.get_ident() and seconds > SLEEP_S:
                self.seen[f"time.sleep {seconds}"] += 1
            sleep(seconds)

        return sleeper

    def _noted(self, name: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._watched == threading.get_ident():
                self.seen[name] += 1
            return wait(*args, **kwargs)

        return noted

    @contextmanager
    def watching(self) -> Iterator[None]:
        """This thread. Meanwhile no garbage is collected: what former tests left, which may close or remove anything, is not
        this one's."""
        was_enabled = gc.isenabled()
        gc.disable()
        self._watched = threading.get_ident()
        try:
            yield
        finally:
            self._watched = None
            if was_enabled:
                gc.enable()


_THE_ONLY_ONE: list[Auditor] = []


def the_auditor() -> Auditor:
    """One for the process: what is hooked into it cannot be taken out."""
    if not _THE_ONLY_ONE:
        _THE_ONLY_ONE.append(Auditor())
    return _THE_ONLY_ONE[0]


def self_check(auditor: Auditor) -> list[str]:
    """The names of what it sees of somebody who does all that is forbidden."""
    auditor.seen.clear()
    with auditor.watching(), open(__file__, "rb"):
        time.sleep(0.001)
        threading.Event().wait(0.001)
        threading.Thread(target=time.sleep, args=(0.001,)).start()
    return sorted(name.split()[0] for name in auditor.seen)
