"""A fleet with little to do: what begins alike meets its own cache, what does not is spread."""

from __future__ import annotations

from collections import Counter

from jdisagg.router.entry import Entry, RunStream
from jdisagg.router.fleet import Fleet
from jdisagg.router.placement import beginning
from jdisagg.router.usable import Wishes
from tests.unit.wire.rig import member

CHAT = tuple(range(3, 40))


def idle_fleet(*addresses: str) -> Fleet:
    fleet = Fleet(dead_after_s=1.0)
    for address in addresses:
        here = {"address": address, "worker": f"decode @ {address}", "epoch": f"epoch of {address}"}
        fleet.register(member(**here, fingerprint="weights"), 0.0)
    for entry in fleet.entries():
        entry.stream = RunStream(0.0, steady_s=0.0)
    return fleet


def who_gets(fleet: Fleet, prompt: tuple[int, ...]) -> Entry:
    entry = fleet.choose("weights", 0.0, wishes=Wishes(kin=beginning(prompt)))
    assert entry is not None
    return entry


def test_a_chat_goes_on_where_it_was_whoever_else_comes_or_goes() -> None:
    homes = {who_gets(idle_fleet("d1", "d2", "d3"), (number, *CHAT)).member.address: number for number in range(40)}
    assert sorted(homes) == ["d1", "d2", "d3"]
    for home, number in homes.items():
        away = next(address for address in homes if address != home)
        for addresses in (["d3", "d2", "d1"], [address for address in homes if address != away], [*homes, "d4"]):
            longer = (number, *CHAT, *range(100, 200))
            assert who_gets(idle_fleet(*addresses), longer).member.address in {home, "d4"}


def test_prompts_that_begin_unlike_are_spread_and_the_less_busy_worker_goes_first() -> None:
    fleet = idle_fleet("d1", "d2", "d3")
    count = Counter(who_gets(fleet, (number, *CHAT)).member.address for number in range(300))
    assert min(count.values()) >= 70, count
    home = who_gets(fleet, CHAT)
    home.pending = 1
    assert who_gets(fleet, CHAT) is not home
