"""Backends as two workers describe them that may pair over tcp, and a firewall between the two."""

from __future__ import annotations

import asyncio
from typing import Any

from jdisagg.handoff.identity import Backend
from tests.unit.wire.peers import SHM

GRPC, TCP = Backend(name="grpc"), Backend(name="tcp")
OF_D = (SHM, TCP, GRPC)
NOT_YET = 30.0


def tcp(endpoint: str) -> Backend:
    return Backend(name="tcp", endpoint=endpoint)


class Firewall:
    """In the place of `_connect`: swallows connections until it is opened."""

    def __init__(self) -> None:
        self.is_open = False
        self.tries = 0

    async def __call__(self, _addresses: Any) -> str | None:
        self.tries += 1
        if not self.is_open:
            await asyncio.sleep(NOT_YET)
        return None
