"""The fault harness tells a wrong token from a lost and a repeated one."""

import pytest
from chaos_kit.catalogue import Entry
from chaos_kit.outcome import Fate, Flaw, Outcome, Visit, flaw_of, flaws_in

RIGHT = [5, 7, 9, 11, 13, 15]
ENTRY = Entry(prompt=(1,), sampling={"temperature": 0.0, "max_tokens": 6})


def outcome(tokens: list[int], **fields) -> Outcome:
    visit = Visit(
        number=0, entry=0, fate=Fate.STAYS, after_s=0.0, over_http=False, stream=True, priority=0, cache_salt=""
    )  # fmt: skip
    return Outcome(visit=visit, tokens={0: tokens}, finish={0: "length"}, **fields)


@pytest.mark.parametrize(
    ("got", "whole", "flaw"),
    [
        (RIGHT, True, None),
        ([5, 7], False, None),
        ([], False, None),
        ([5, 7], True, Flaw.LOST),
        ([5, 9, 11, 13, 15], True, Flaw.LOST),
        ([5, 7, 7, 9, 11], False, Flaw.DUPLICATED),
        ([5, 7, 9, 5, 7, 9, 11], False, Flaw.DUPLICATED),
        ([*RIGHT, 15], True, Flaw.DUPLICATED),
        ([5, 7, 9, 4, 13, 15], True, Flaw.WRONG),
        ([4], False, Flaw.WRONG),
    ],
)
def test_a_flaw_is_named(got: list[int], whole: bool, flaw: Flaw | None) -> None:
    assert flaw_of(got, RIGHT, whole=whole) is flaw


def test_a_stream_that_says_otherwise_at_its_end_is_wrong() -> None:
    assert flaws_in(outcome(RIGHT, complete={0: RIGHT}), ENTRY, {0: RIGHT}, exact=True) == []
    assert flaws_in(outcome(RIGHT, complete={0: [*RIGHT, 1]}), ENTRY, {0: RIGHT}, exact=True) == [Flaw.WRONG]
    assert flaws_in(outcome(RIGHT, changed=True), ENTRY, {0: RIGHT}, exact=True) == [Flaw.WRONG]


def test_in_fast_numerics_only_counts_and_sent_tokens_are_judged() -> None:
    other = [5, 7, 8, 8, 8, 8]
    assert flaws_in(outcome(other, complete={0: other}), ENTRY, {0: RIGHT}, exact=False) == []
    assert flaws_in(outcome(other, complete={0: RIGHT}), ENTRY, {0: RIGHT}, exact=False) == [Flaw.WRONG]
    assert flaws_in(outcome(other[:5]), ENTRY, {0: RIGHT}, exact=False) == [Flaw.LOST]
    assert flaws_in(outcome([*other, 8]), ENTRY, {0: RIGHT}, exact=False) == [Flaw.DUPLICATED]
    assert flaws_in(outcome(other[:2], error="UNAVAILABLE"), ENTRY, {0: RIGHT}, exact=False) == []
