"""Which prefill workers a decode worker may ask for requests that name none: its own clients'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jdisagg.core.fleet import MAX_PREFILL_PEERS
from jdisagg.core.told import few_of

SILENT_S = 60.0  # of a router, while others speak


class PrefillDirectory:
    """Those of --prefill, then those that routers tell of. Written by one thread, read by others: tuples are replaced whole."""

    def __init__(self, static: tuple[str, ...]) -> None:
        self.static = static
        self.told: tuple[str, ...] = ()
        self._by_router: dict[str, tuple[tuple[str, ...], float]] = {}  # what it told last, and when

    def learn(self, router: str, peers: tuple[str, ...], failures: Mapping[str, str], now_s: float) -> None:
        """What the router has now, best first. It counts until that router says something else: the workers of a router that
        went away are still there, or were; they come behind those of routers that have spoken since. Those of one that has said
        nothing for SILENT_S, and that cannot be used (`failures`: why, "" = they can), are taken for gone with it. Of a router
        without any nothing is kept: where they come and go behind one name, each has a new address."""
        said = {router: (peers, now_s)}
        for other, (told, heard_s) in self._by_router.items():
            if other != router:
                kept = tuple(peer for peer in told if now_s - heard_s < SILENT_S or not failures.get(peer))
                said[other] = kept, heard_s
        self._by_router = {one: (told, heard_s) for one, (told, heard_s) in said.items() if told}
        self.told = tuple(dict.fromkeys(peer for told, _ in self._by_router.values() for peer in told))

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
        return f"no usable prefill worker ({few_of(whys, '; ') or nobody})"
