"""Whether whoever connects to the gRPC port of this process is answered.

gRPC asks the kernel for connections until that fails, and again only where this process has no descriptor left. A table of
files that is full (ENFILE) or memory that is short (ENOMEM, ENOBUFS), for a moment, and it never does any more: the kernel goes
on taking connections, on which nothing comes, while streams that stand know of nothing. Only a fresh process has a port again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from jdisagg.api.tasks import cancel_and_wait, first_of
from jdisagg.core.host_names import Names, is_own
from jdisagg.serve.environment import check_descriptors
from jdisagg.serve.process import Process

log = logging.getLogger(__name__)

LOOK_S = 30.0  # between two looks; one costs 0.5 ms, and two descriptors meanwhile
ANSWER_S = 10.0  # a server speaks first
MOST_SILENT = 3  # connections, one after the other
EXIT_NOT_ACCEPTING = 72
_DESCRIPTORS = 2


async def end_when_nobody_accepts(process: Process, address: str) -> None:
    """Have the process drain and end once connections to `address`, as it was bound, are not answered that were before; until
    cancelled."""
    num_silent, has_answered = 0, False  # else it may be a firewall that keeps this process from its own address
    while num_silent < MOST_SILENT:
        is_answered = await _is_answered(address)
        has_answered = has_answered or is_answered is True
        num_silent = num_silent + 1 if has_answered and is_answered is False else 0
        if not num_silent:
            await asyncio.sleep(LOOK_S)
    log.critical(
        "gRPC on %s accepts nobody any more, and never will: the system had no file or memory for a connection; draining, so "
        "that a fresh process takes this one's place",
        address,
    )
    process.end_with(EXIT_NOT_ACCEPTING)


async def _is_answered(address: str) -> bool | None:
    """Whether something comes on a new connection, be it that it is hung up on, as there are too many. None: nobody can tell,
    as there is no descriptor for it or for its other end, which gRPC asks for again, or as it is not known, if a name, to be
    this machine's at the moment."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.wrap_future(Names().look_up(host.strip("[]")))  # as long as a resolver takes
    except ConnectionError:
        return None
    asked = asyncio.create_task(_ask([str(one.sockaddr[0]) for one in found if is_own(one)], int(port)))
    try:
        await first_of(asked, timeout_s=ANSWER_S)
        if asked.done():
            return asked.result()
        return False if _has_descriptors() else None
    finally:
        await cancel_and_wait(asked)


def _has_descriptors() -> bool:
    try:
        check_descriptors(_DESCRIPTORS)
    except OSError:
        return False
    return True


async def _ask(hosts: Sequence[str], port: int) -> bool | None:
    for host in hosts:  # 0.0.0.0, too
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                with suppress(OSError):
                    await reader.read(1)
                return True
            finally:
                writer.close()
    return None
