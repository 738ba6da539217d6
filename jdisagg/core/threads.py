"""Whether this machine has threads left, asked before a library needs some that cannot do without."""

from __future__ import annotations

import threading


def check_threads(number: int) -> None:
    """Raises RuntimeError where there are fewer than `number` left."""
    enough, started = threading.Event(), list[threading.Thread]()
    try:
        while len(started) < number:
            thread = threading.Thread(target=enough.wait, name="any-thread-left", daemon=True)
            thread.start()
            started.append(thread)
    finally:
        enough.set()
        for thread in started:
            thread.join()
