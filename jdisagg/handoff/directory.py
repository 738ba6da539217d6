"""Which prefill workers a decode worker may ask for requests that name none: its own clients'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jdisagg.core.fleet import MAX_PREFILL_PEERS
from jdisagg.core.told import first_of

SILENT_S = 60.0  # of a router, while others speak


class PrefillDirectory:
    """Those of --prefill, then those that routers tell of. Written by one thread, read by others: tuples are replaced whole."""

    def __init__(self, static: tuple[str, ...]) -> None:
        self.static = static
        self.told: tuple[str, ...] = ()
        self._by_router: dict[str, tuple[str, ...]] = {}
        self._heard_s: dict[str, float] = {}

    def learn(self, router: str, peers: tuple[str, ...], failures: Mapping[str, str], now_s: float) -> None:
        """What the router has now, best first. It counts until that router says something else: the workers of a router that
        went away are still there, or were; they come behind those of routers that have spoken since. Those of one that has said
        nothing for SILENT_S, and that cannot be used (`failures`: why, "" = they can), are taken for gone with it. Of a router
        without any nothing is kept: where they come and go behind one name, each has a new address."""
        self._heard_s[router] = now_s
        said = {router: peers} | {
            other: tuple(peer for peer in told if now_s - self._heard_s[other] < SILENT_S or not failures.get(peer))
            for other, told in self._by_router.items()
            if other != router
        }
        self._by_router = {one: told for one, told in said.items() if told}
        self._heard_s = {one: self._heard_s[one] for one in self._by_router}
        self.told = tuple(dict.fromkeys(peer for told in self._by_router.values() for peer in told))

    def candidates(self, is_shunned: Callable[[str], bool]) -> tuple[str, ...]:
        """For one request, in order of preference. Of those that routers tell of, it may try a few, and none that is shunned
        while there are others: who is not reached is idle, and comes first in what routers say."""
        few = sorted(self.told, key=is_shunned)[:MAX_PREFILL_PEERS]
        return tuple(dict.fromkeys((*self.static, *few)))

    def not_ready_reason(self, failures: Mapping[str, str]) -> str:
        """Empty when one of them can be expected to serve. `failures`: why each peer spoken to cannot be used, "" = it can. A
        router tells of workers that it hears from: such a one counts until it failed here; one of --prefill has to answer."""
        if any(failures.get(peer) == "" for peer in self.static) or any(not failures.get(peer) for peer in self.told):
            return ""
        whys = [f"{peer}: {why.removeprefix(f'prefill peer {peer}: ')}" for peer, why in failures.items() if why]
        nobody = "none has answered yet" if self.static else "no router knows one that pairs with this worker"
        return f"no usable prefill worker ({first_of(whys, '; ') or nobody})"
