"""Whether whoever connects to the gRPC port of this process is answered, and whether there is room for one more.

gRPC asks the kernel for connections until that fails, and again only where this process has no descriptor left. A table of
files that is full (ENFILE) or memory that is short (ENOMEM, ENOBUFS), for a moment, and it never does any more: the kernel goes
on taking connections, on which nothing comes, while streams that stand know of nothing. Only a fresh process has a port again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from time import monotonic

from jdisagg.api.listening import SHARE, most_connections
from jdisagg.api.tasks import cancel_and_wait, first_of
from jdisagg.core.host_names import Names, is_own
from jdisagg.core.logs import Seldom
from jdisagg.serve.environment import check_descriptors
from jdisagg.serve.process import Process

log = logging.getLogger(__name__)

LOOK_S = 30.0  # between two looks; one costs 0.5 ms, and two descriptors meanwhile
ANSWER_S = 10.0  # a server speaks first
MOST_SILENT = 3  # connections, one after the other
EXIT_NOT_ACCEPTING = 72
TOLD_EVERY_S = 300.0  # of connections that are all taken
_DESCRIPTORS = 2


class Heard(Enum):
    """What came of one more connection."""

    A_WORD = auto()
    HUNG_UP = auto()  # as there are too many
    NOTHING = auto()
    NOBODY_KNOWS = auto()


async def end_when_nobody_accepts(process: Process, address: str, on_full: Callable[[], object] = lambda: None) -> None:
    """Have the process drain and end once connections to `address`, as it was bound, are not answered that were before; until
    cancelled. `on_full`: called for each that is hung up on, of which the log has a line now and then; nothing else tells, as
    gRPC does not."""
    num_silent, has_answered = 0, False  # else it may be a firewall that keeps this process from its own address
    seldom = Seldom(TOLD_EVERY_S)
    while num_silent < MOST_SILENT:
        heard = await _hear(address)
        has_answered = has_answered or heard in (Heard.A_WORD, Heard.HUNG_UP)
        if heard is Heard.HUNG_UP and (most := most_connections()) is not None:
            on_full()
            text = (
                "gRPC on %s keeps %d connections, %.0f%% of this process's descriptors, and all are taken: others, of workers "
                "too, are hung up on"
            )
            seldom.say(log, logging.WARNING, text, address, most, 100 * SHARE, now_s=monotonic())
        num_silent = num_silent + 1 if has_answered and heard is Heard.NOTHING else 0
        if not num_silent:
            await asyncio.sleep(LOOK_S)
    log.critical(
        "gRPC on %s accepts nobody any more, and never will: the system had no file or memory for a connection; draining, so "
        "that a fresh process takes this one's place",
        address,
    )
    process.end_with(EXIT_NOT_ACCEPTING)


async def _hear(address: str) -> Heard:
    """What comes on a new connection. NOBODY_KNOWS where there is no descriptor for it or for its other end, which gRPC asks
    for again, or where it is not known, if a name, to be this machine's at the moment."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.wrap_future(Names().look_up(host.strip("[]")))  # as long as a resolver takes
    except ConnectionError:
        return Heard.NOBODY_KNOWS
    asked = asyncio.create_task(_ask([str(one.sockaddr[0]) for one in found if is_own(one)], int(port)))
    try:
        await first_of(asked, timeout_s=ANSWER_S)
        if asked.done():
            return asked.result()
        return Heard.NOTHING if _has_descriptors() else Heard.NOBODY_KNOWS
    finally:
        await cancel_and_wait(asked)


def _has_descriptors() -> bool:
    try:
        check_descriptors(_DESCRIPTORS)
    except OSError:
        return False
    return True


async def _ask(hosts: Sequence[str], port: int) -> Heard:
    for host in hosts:  # 0.0.0.0, too
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                with suppress(OSError):
                    return Heard.A_WORD if await reader.read(1) else Heard.HUNG_UP
                return Heard.HUNG_UP
            finally:
                writer.close()
    return Heard.NOBODY_KNOWS
