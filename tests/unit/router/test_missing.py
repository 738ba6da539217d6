"""What nobody would do any more, did a worker drain: operators are told before they drain it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.fleet import State
from jdisagg.core.requests import Role
from jdisagg.router import standings
from jdisagg.router.fleet import Fleet
from jdisagg.router.usable import missing_without
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import member

NOW_S = 10.0
NOBODY = "nobody is left for new requests: "


def missing(*workers: tuple[str, Role, dict[str, object]]) -> dict[str, str]:
    """By address, of a fleet of these, whose streams stand."""
    fleet = Fleet(dead_after_s=1.0)
    for address, role, changes in workers:
        fleet.register(member(MEMBER, role=role, address=address, worker=address, **changes), NOW_S)
    for entry in fleet.entries():
        fleet.link(entry, NOW_S)
    return {one.address: standing.missing_without for one, standing in fleet.standings(NOW_S) if standing.missing_without}


def test_nothing_is_missing_while_another_one_of_the_role_and_the_weights_works() -> None:
    pair = [(f"d:{number}", Role.DECODE, {}) for number in (1, 2)] + [(f"p:{number}", Role.PREFILL, {}) for number in (1, 2)]
    assert missing(*pair) == {}
    assert missing(("u:1", Role.UNIFIED, {}), ("d:1", Role.DECODE, {"fingerprint": "others"})) == {}


@pytest.mark.parametrize(
    "other", [None, {"draining": True}, {"not_ready": "no prefill worker"}], ids=["none", "draining", "not ready"]
)
def test_without_the_last_decode_worker_nobody_is_left(other: dict[str, object] | None) -> None:
    others = [] if other is None else [("d:2", Role.DECODE, other)]
    found = missing(("d:1", Role.DECODE, {}), *others, ("p:1", Role.PREFILL, {}), ("p:2", Role.PREFILL, {}))
    assert found.keys() == {"d:1"}, "one that does no work leaves none"
    why = "no decode or unified worker is ready" if other and "not_ready" in other else "every decode or unified worker is"
    assert found["d:1"].startswith(NOBODY + why)


@pytest.mark.parametrize("needs_prefill", [True, False])
def test_without_the_last_prefill_worker_of_its_weights_decode_workers_compute_prompts_or_do_nothing(
    needs_prefill: bool,
) -> None:
    ds = [(f"d:{number}", Role.DECODE, {"needs_prefill": needs_prefill}) for number in (1, 2)]
    found = missing(*ds, ("p:1", Role.PREFILL, {}), ("p:2", Role.PREFILL, {"fingerprint": "others"}))
    assert found.keys() == {"p:1"}, "those of other weights are nobody's"
    if needs_prefill:
        assert found["p:1"].startswith(f"{NOBODY}no prefill worker that pairs with d:1, d:2")
    else:
        assert found["p:1"] == "no other of its weights computes prompts: decode workers do it themselves"


@pytest.mark.parametrize("suspect", [True, False])
def test_one_that_failed_lately_or_has_no_partner_of_its_weights_works_all_the_same(suspect: bool) -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(member(MEMBER, role=Role.DECODE, address="d:1"), NOW_S)
    fleet.register(member(MEMBER, role=Role.PREFILL, address="p:1", fingerprint="others"), NOW_S)
    entry = fleet.entries()[0]
    fleet.link(entry, NOW_S)
    if suspect:
        fleet.suspect(entry, NOW_S)
        fleet.remove(fleet.entries()[1])
    ((_, standing), *_) = fleet.standings(NOW_S)
    assert standing.state is (State.SUSPECT if suspect else State.UNPAIRED)
    assert standing.missing_without.startswith(NOBODY)


def test_only_the_last_of_its_kind_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a look at the whole fleet, on the loop that serves."""
    asked: list[str] = []
    monkeypatch.setattr(standings, "missing_without", lambda entry, _: asked.append(entry.member.address) or "")
    idle = [(f"u:{number}", Role.UNIFIED, {"not_ready": "of its own"}) for number in range(3)]
    missing(*idle, ("u:9", Role.UNIFIED, {}), *((f"d:{number}", Role.DECODE, {}) for number in range(3)))
    assert asked == ["u:9"]


def test_the_log_has_the_same_words_when_it_does_drain() -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(MEMBER, NOW_S)
    (entry,) = fleet.entries()
    fleet.link(entry, NOW_S)
    (before,) = (standing.missing_without for _, standing in fleet.standings(NOW_S))
    entry.member = replace(entry.member, draining=True)
    assert before == missing_without(entry, fleet.entries())
    assert [standing.missing_without for _, standing in fleet.standings(NOW_S)] == [""], "it does no work any more"
