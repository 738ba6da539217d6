"""Which routers a HOST:PORT of --router stands for: one, or, of a name with several addresses, the one at each of them.

Such a name is that of a headless Service of Kubernetes, or a round robin of DNS. Its addresses come and go, so it is looked up
again and again; a name with one address is left to gRPC, which looks it up at every connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from jdisagg.api.channels import join_address
from jdisagg.core.host_names import Address, Names

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two look-ups of a name, and what one may take
LOOK_SOON_S = 1.0  # .. when a router does not answer: it may be elsewhere by now


class RouterNames:
    """Lives on one event loop."""

    def __init__(self, routers: tuple[str, ...]) -> None:
        """`routers` as typed; until `look` each stands for itself."""
        self._names = Names(remember_s=LOOK_SOON_S / 2)
        self._behind: dict[str, tuple[str, ...]] = {router: (router,) for router in routers}

    @property
    def wanted(self) -> tuple[str, ...]:
        """HOST:PORT of every router, in order."""
        return tuple(dict.fromkeys(router for behind in self._behind.values() for router in behind))

    async def look(self) -> None:
        """Ask for all names, at most LOOK_S; what has no answer stays what it was."""
        await asyncio.gather(*(self._look(router) for router in self._behind))

    async def _look(self, router: str) -> None:
        host = router.rpartition(":")[0].strip("[]")
        try:
            async with asyncio.timeout(LOOK_S):
                found = await asyncio.wrap_future(self._names.look_up(host))
        except (TimeoutError, ConnectionError) as error:
            log.debug("router %s: %s", router, error)
            return
        before = self._behind[router]
        self._behind[router] = now = routers_at(router, found, before)
        if set(now) != set(before):
            log.info("router %s is at %s", router, ", ".join(now))


def routers_at(router: str, found: Sequence[Address], before: tuple[str, ...]) -> tuple[str, ...]:
    """Each router behind one HOST:PORT that has the addresses `found` and stood for `before`.

    Addresses of two families are two ways to the same routers: those of the family that has more are taken. A name that had
    several once is known by its addresses from then on.
    """
    port = int(router.rpartition(":")[2])
    by_family: dict[int, set[str]] = {}
    for address in found:
        by_family.setdefault(address.family, set()).add(join_address(address.sockaddr[0], port))
    most = max(by_family.values(), key=lambda those: (len(those), len(those.intersection(before))), default=set())
    if len(most) <= 1 and before == (router,):
        return before
    return tuple(sorted(most)) or before
