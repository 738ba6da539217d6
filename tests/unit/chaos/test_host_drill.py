"""The verdict on streams under a broken network, and what is run where hosts cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drills
import pytest
from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice
from chaos_kit.drill_report import cut_table
from chaos_kit.host_drill import Survived, became
from chaos_kit.network import NoNetwork, way_in
from chaos_kit.outcome import Fate, Outcome, Visit

RIGHT = Choice([1, 2, 3, 4], "abcd", [(-0.1, None)] * 4, "length")


def outcome(**other: Any) -> Survived:
    everything = {"cut": "x", "may_fail": False, "became": {"exact": 3}, "named": 0, "slowest_s": 1.0, "whole_s": 1.0}
    return Survived(**{**everything, "missing": "", "ended": (), "rungs": {}, **other})


def answer(choices: dict[int, Choice], error: str | None = None) -> Outcome:
    """Told as many tokens as came."""
    visit = Visit(number=0, entry=0, fate=Fate.STAYS, after_s=0, over_http=True, stream=True, priority=0, cache_salt="")
    return Outcome(visit=visit, choices=choices, error=error, usage=(1, sum(len(one.tokens) for one in choices.values())))


@pytest.mark.parametrize(
    ("choices", "error", "fate"),
    [
        ({0: RIGHT}, None, "exact"),
        ({0: Choice([1, 2, 3], "abc", [(-0.1, None)] * 3, "length")}, None, "LOST"),
        ({}, None, "LOST"),
        ({0: RIGHT, 1: Choice([5])}, None, "DUPLICATED"),
        ({0: RIGHT, 1: Choice([5])}, "SERVICE_UNAVAILABLE", "DUPLICATED"),
        ({0: Choice([1, 2], "ab", [(-0.1, None)] * 2)}, "SERVICE_UNAVAILABLE", "SERVICE_UNAVAILABLE"),
        ({0: Choice([1, 9], "ax", [(-0.1, None)] * 2)}, "SERVICE_UNAVAILABLE", "WRONG"),
        ({0: Choice([1, 2], "ab", [(-0.1, None)] * 2)}, "TRANSPORT", "TRANSPORT"),
    ],
)
def test_an_answer_is_exact_or_fails_behind_right_tokens_or_has_a_flaw(
    choices: dict[int, Choice], error: str | None, fate: str
) -> None:
    entry = Entry(prompt=(1,), sampling={"max_tokens": 4})
    assert became(answer(choices, error), entry, {0: RIGHT}) == fate


def test_the_flaw_of_a_choice_is_told_before_that_of_the_counts() -> None:
    lost = answer({0: Choice([1, 2, 3], "abc", [(-0.1, None)] * 3, "length")})
    lost.usage = (1, 4)
    assert became(lost, Entry(prompt=(1,), sampling={"max_tokens": 4}), {0: RIGHT}) == "LOST"
    mistold = answer({0: RIGHT})
    mistold.usage = None
    assert became(mistold, Entry(prompt=(1,), sampling={"max_tokens": 4}), {0: RIGHT}) == "MISTOLD"


@pytest.mark.parametrize(
    ("other", "ok"),
    [
        ({}, True),
        ({"became": {"exact": 2, "WRONG": 1}}, False),
        ({"became": {"exact": 2, "HANG": 1}, "may_fail": True}, False),
        ({"became": {"exact": 2, "503": 1}, "named": 1}, False),
        ({"became": {"exact": 2, "503": 1}, "named": 1, "may_fail": True}, True),
        ({"became": {"exact": 1, "503": 1, "TRANSPORT": 1}, "named": 1, "may_fail": True}, False),
        ({"missing": "the router has no D"}, False),
        ({"ended": ("d1",)}, False),
    ],
)
def test_a_cut_is_as_it_must_be_when_only_those_failed_that_had_no_way(other: dict[str, Any], ok: bool) -> None:
    assert outcome(**other).ok is ok


def test_the_table_of_cuts_tells_the_slowest_stream_beside_that_of_the_undisturbed_fleet() -> None:
    lines = cut_table([outcome(slowest_s=7.25)], "", calm_s=2.5).splitlines()
    assert "7.2" in lines[1]
    assert lines[-1].endswith("slowest undisturbed: 2.5 s")


def test_all_parts_go_without_hosts_where_these_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drills.parts("all") == ("table", "gaps")
    assert "without part hosts: ip is missing (package iproute2)" in capsys.readouterr().out
    assert drills.parts("gaps") == ("gaps",)
    with pytest.raises(NoNetwork, match="ip is missing"):
        drills.parts("hosts")


def test_who_may_not_make_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("ip", "unshare", "nsenter"):
        (tmp_path / tool).write_text("#!/bin/sh\necho $0: unshare failed: Operation not permitted >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(NoNetwork, match=r"the rights are missing .*unshare -Urn: .*Operation not permitted") as refused:
        way_in()
    assert "\n" not in str(refused.value)
