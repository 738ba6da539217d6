"""A fleet whose prefill and decode workers cannot pair, or compute unlike bits, is told of once, and not while it restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.fleet import Member
from jdisagg.core.requests import Role
from jdisagg.router import partners
from jdisagg.router.partners import differing
from jdisagg.router.watch import LONELY_S, SETTLE_S, FleetWatch
from tests.unit.router.rig import look
from tests.unit.wire.rig import member

P = member(role=Role.PREFILL, worker="pid 1 @ h:1", fingerprint="f" * 64)
D = member(P, role=Role.DECODE, address="h:2", worker="pid 2 @ h:2", fingerprint="e" * 64)
PAIRED = member(D, fingerprint=P.card.fingerprint)


def test_workers_that_stay_apart_are_named_once() -> None:
    watch = FleetWatch()
    assert look(watch, (P, D), 0.0) is None, "it may be a restart"
    said = look(watch, (P, D), SETTLE_S)
    assert said is not None
    assert "pid 1 @ h:1 (fingerprint ffffffffffff)" in said
    assert "pid 2 @ h:2 (fingerprint eeeeeeeeeeee)" in said
    assert "do not pair: weights, model configuration and --numerics must be the same on both" in said
    assert look(watch, (P, D), 5 * SETTLE_S) is None


def test_decode_workers_that_may_not_compute_prompts_are_said_to_serve_nothing() -> None:
    watch, strict = FleetWatch(), replace(D, needs_prefill=True)
    look(watch, (P, strict), 0.0)
    said = look(watch, (P, strict), SETTLE_S)
    assert said is not None
    assert said.endswith("must be the same on both; --local-prefill never: they serve nothing")
    assert "compute their prompts" not in said


def made_of(like: Member, numerics: str, weights: str) -> Member:
    parts = (("numerics", numerics), ("weights.layers", weights))
    return member(like, address=f"h:{numerics}{weights}", fingerprint=numerics + weights, fingerprint_parts=parts)


@pytest.mark.parametrize(
    ("members", "differing"),
    [
        ((made_of(P, "exact", "aa"), made_of(D, "fast", "aa")), "numerics (prefill exact, decode fast)"),
        (
            (made_of(P, "exact", "aa"), made_of(D, "fast", "bb")),
            "numerics (prefill exact, decode fast; also weights.layers)",
        ),
        (  # one kind of difference is told once, however many workers show it
            (made_of(P, "exact", "aa"), replace(made_of(P, "exact", "aa"), epoch="b"), made_of(D, "exact", "bb")),
            "weights.layers (prefill aa, decode bb)",
        ),
        (
            (made_of(P, "exact", "aa"), made_of(P, "fast", "bb"), made_of(D, "exact", "bb")),
            "weights.layers (prefill aa, decode bb); numerics (prefill fast, decode exact)",
        ),
        ((P, made_of(P, "exact", "aa"), made_of(D, "fast", "aa")), "numerics (prefill exact, decode fast)"),
        ((P, made_of(D, "fast", "aa")), "weights, model configuration and --numerics"),
    ],
)
def test_what_differs_between_workers_that_stay_apart_is_told(members: tuple[Member, ...], differing: str) -> None:
    watch = FleetWatch()
    look(watch, members, 0.0)
    said = look(watch, members, SETTLE_S)
    assert said is not None
    assert f" do not pair: {differing} must be the same on both; " in said


def test_a_decode_worker_that_never_computes_prompts_is_named_where_others_have_all_the_prefill_workers() -> None:
    watch, needy = FleetWatch(), replace(D, needs_prefill=True)
    members = (P, PAIRED, needy)
    assert look(watch, members, 0.0) is None
    said = look(watch, members, SETTLE_S)
    assert said is not None
    assert said.startswith("prefill worker pid 1 @ h:1 (fingerprint ffffffffffff) and decode worker pid 2 @ h:2 (")
    assert said.endswith("they serve nothing")
    assert look(watch, members, 5 * SETTLE_S) is None


def test_another_set_is_named_again_and_so_is_the_same_one_after_it_paired() -> None:
    watch, other = FleetWatch(), replace(P, epoch="b")
    assert look(watch, (P, D), 0.0) is look(watch, (P, PAIRED), 1.0) is None
    assert look(watch, (P, D), 2.0) is None
    assert look(watch, (P, D), SETTLE_S + 1.9) is None
    assert look(watch, (P, D), SETTLE_S + 2.0)
    assert look(watch, (other, D), 20.0) is None
    assert look(watch, (other, D), 20.0 + SETTLE_S)
    assert look(watch, (other, PAIRED), 40.0) is None
    assert look(watch, (other, D), 41.0) is None
    assert look(watch, (other, D), 41.0 + SETTLE_S)


def test_a_fleet_with_one_kind_alone_half_upgraded_or_leaving_is_fine() -> None:
    watch, unified = FleetWatch(), replace(D, role=Role.UNIFIED)
    fine = ((P,), (D,), (P, PAIRED, D), (P, unified), (replace(P, draining=True), D), (P, replace(D, draining=True)))
    for members in fine:
        for now_s in (0.0, SETTLE_S, 2 * SETTLE_S):
            assert look(watch, members, now_s) is None, members


def test_of_many_workers_those_that_are_alike_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a worker asks what there is none of, several times a second."""
    compared: list[object] = []
    difference = partners.difference
    monkeypatch.setattr(partners, "difference", lambda *parts: (compared.append(parts), difference(*parts))[1])
    ps = [replace(made_of(P, "exact", "aa"), address=f"p:{number}") for number in range(64)]
    ds = [replace(made_of(D, numerics, "aa"), address=f"d:{number}") for number in range(64) for numerics in ("fast", "odd")]
    assert differing(ps, ds) == "numerics (prefill exact, decode fast); numerics (prefill exact, decode odd)"
    assert len(compared) == 2


OTHER_P = member(P, address="h:3", worker="pid 3 @ h:3", fingerprint="e" * 64)


@pytest.mark.parametrize(
    ("odd", "others", "told"),
    [
        (
            made_of(P, "exact", "bb"),
            (made_of(P, "exact", "aa"), made_of(D, "exact", "aa")),
            "prefill worker pid 1 @ h:1 (fingerprint exactbb) gets none of this router's prompts, as no decode worker "
            "here has the same weights: weights.layers (prefill bb, decode aa) must be the same on both; "
            "it has been so for 5 minutes",
        ),
        (
            made_of(D, "exact", "bb"),
            (made_of(P, "exact", "aa"), made_of(D, "exact", "aa")),
            "decode worker pid 2 @ h:2 (fingerprint exactbb) is asked after others that are well, as no prefill worker "
            "here has the same weights: weights.layers (prefill aa, decode bb) must be the same on both; "
            "it has been so for 5 minutes",
        ),
    ],
)
def test_one_that_is_alone_with_its_weights_beside_a_fleet_that_pairs_is_named_once_it_has_lasted(
    odd: Member, others: tuple[Member, ...], told: str
) -> None:
    """A roll-out passes through it."""
    watch, members = FleetWatch(), (*others, odd)
    assert look(watch, members, 100.0) is look(watch, members, 99.0 + LONELY_S) is None
    assert look(watch, members, 100.0 + LONELY_S) == told
    assert look(watch, members, 100.0 + 9 * LONELY_S) is None
    assert look(watch, others, 5000.0) is None
    assert look(watch, members, 5001.0) is look(watch, members, 5000.0 + LONELY_S) is None, "it was away meanwhile"
    assert look(watch, members, 5001.0 + LONELY_S) == told


def test_several_that_are_alone_are_one_line_of_each_role_and_those_that_stay_apart_are_told_of_as_such() -> None:
    watch, twin = FleetWatch(), replace(OTHER_P, address="h:4", worker="pid 4 @ h:4")
    members = (P, PAIRED, OTHER_P, twin)
    assert look(watch, members, 0.0) is None
    said = look(watch, members, LONELY_S)
    assert said is not None
    assert said.startswith("prefill workers pid 3 @ h:3 (fingerprint eeeeeeeeeeee), pid 4 @ h:4 (")
    assert look(watch, members, LONELY_S) is None
    watch = FleetWatch()
    assert look(watch, (P, D), 0.0) is None
    assert "do not pair" in (look(watch, (P, D), LONELY_S) or "")
    assert look(watch, (P, D), 2 * LONELY_S) is None, "the same once more"


def test_nothing_is_told_while_more_of_them_come_and_then_of_all_at_once() -> None:
    watch, here = FleetWatch(), [P]
    for number in range(4):
        here.append(replace(D, address=f"h:{number}", epoch=f"e{number}", worker=f"pid {number + 5} @ h:{number}"))
        assert look(watch, here, number * (SETTLE_S - 1.0)) is None
    said = look(watch, here, 3 * (SETTLE_S - 1.0) + SETTLE_S)
    assert said is not None
    assert all(f"pid {number + 5} @ h:{number}" in said for number in range(4))


def test_one_that_is_alone_is_told_of_though_another_one_that_is_starts_again_and_again() -> None:
    watch, here, step_s = FleetWatch(), (P, PAIRED, OTHER_P), LONELY_S / 4
    told: dict[float, str | None] = {}
    for number in range(9):  # one that ends in its first minute or two: each time it is another process
        restarted = replace(OTHER_P, address="h:4", epoch=f"e{number}", worker=f"pid {number + 50} @ h:4")
        told[number * step_s] = look(watch, (*here, restarted), number * step_s)
    assert [now_s for now_s, line in told.items() if line is not None] == [LONELY_S], "once"
    line = told[LONELY_S]
    assert line is not None
    assert line.startswith("prefill worker pid 3 @ h:3 (fingerprint eeeeeeeeeeee) gets none"), "the other came just now"


def test_one_that_drains_is_not_told_of_though_nobody_pairs_with_it_any_more() -> None:
    """What it still has may take longer than those five minutes."""
    leaving = member(D, address="h:5", worker="pid 5 @ h:5", fingerprint="d" * 64, draining=True)
    watch, members = FleetWatch(), (leaving, P, PAIRED)
    assert look(watch, members, 0.0) is look(watch, members, LONELY_S) is None
    watch, members = FleetWatch(), (*members, OTHER_P)
    assert look(watch, members, 0.0) is None
    said = look(watch, members, LONELY_S)
    assert said is not None
    assert said.startswith("prefill worker pid 3 @ h:3 (fingerprint eeeeeeeeeeee) gets none")
