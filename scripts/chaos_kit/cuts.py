"""Everything that breaks between the hosts of a fleet: a router r, prefill workers p1 and p2, decode workers d1 and d2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from chaos_kit.network import Network

PREFILL, DECODE = ("p1", "p2"), ("d1", "d2")
HOSTS = ("r", *PREFILL, *DECODE)
STRANGER = "x"  # a host that belongs to nobody
LOOSE_S = 0.3  # below a second it is no use to pull the cable: Linux waits so long until it believes in a new one


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One way to break the network. `may_fail`: no worker can be reached, so streams may, with an error that says so."""

    name: str
    begin: Callable[[Network], None]
    loose_s: float | None = None  # broken and whole by turns, so long each; None = broken all the time
    may_fail: bool = False


def _hole(sender: str, receiver: str) -> Cut:
    return Cut(name=f"{sender} > {receiver} lost", begin=lambda network: network.hole(sender, receiver))


def _apart(name: str, ones: tuple[str, ...], others: tuple[str, ...], *, may_fail: bool = False) -> Cut:
    def begin(network: Network) -> None:
        for one, other in product(ones, others):
            network.hole(one, other)
            network.hole(other, one)

    return Cut(name=name, begin=begin, may_fail=may_fail)


def _refused(sender: str, receiver: str, kind: str) -> Cut:
    return Cut(name=f"{sender} > {receiver} {kind}", begin=lambda network: network.refuse(sender, receiver, kind))


CUTS = (
    _hole("p1", "d1"),
    _hole("d1", "p1"),
    _apart("p1 and d1 apart", ("p1",), ("d1",)),
    _hole("r", "d1"),
    _hole("d1", "r"),
    _apart("r and d1 apart", ("r",), ("d1",)),
    _hole("p1", "r"),
    _apart("r and p1 apart", ("r",), ("p1",)),
    _apart("every p and d apart", PREFILL, DECODE),
    _apart("client and r apart", ("client",), ("r",)),
    Cut(name="d1 unplugged", begin=lambda network: network.unplug("d1")),
    Cut(name="p1 unplugged", begin=lambda network: network.unplug("p1")),
    Cut(name="d1 stranded", begin=lambda network: network.strand("d1")),
    Cut(name="p1 stranded", begin=lambda network: network.strand("p1")),
    Cut(name="d1 loose", begin=lambda network: network.strand("d1"), loose_s=LOOSE_S),
    _refused("r", "d1", "unreachable"),
    _refused("d1", "p1", "prohibit"),
    _refused("d1", "p1", "blackhole"),
    Cut(name="d1 takes small frames", begin=lambda network: network.narrow("d1")),
    Cut(name="p1 takes small frames", begin=lambda network: network.narrow("p1")),
    Cut(name="d1's address elsewhere", begin=lambda network: network.impersonate("d1", STRANGER)),
    Cut(name="p1's address elsewhere", begin=lambda network: network.impersonate("p1", STRANGER)),
    _apart("r and all workers apart", ("r",), (*PREFILL, *DECODE), may_fail=True),
)
BY_NAME = {cut.name: cut for cut in CUTS}
