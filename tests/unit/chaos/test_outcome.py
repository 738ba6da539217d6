"""The fault harness tells a wrong token from a lost and a repeated one."""

from dataclasses import replace
from typing import Any, cast

import pytest
from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice, Flaw, flaw_of
from chaos_kit.client import _take
from chaos_kit.outcome import Fate, Outcome, Visit, flaws_in

from jdisagg.api.codec import encode_logprob
from jdisagg.api.generation.choice import ScoredToken
from jdisagg.api.http.shapes import completion_logprobs
from jdisagg.core.requests import TokenLogprob
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2

RIGHT = [5, 7, 9, 11, 13, 15]
ENTRY = Entry(prompt=(1,), sampling={"temperature": 0.0, "max_tokens": 6})


def outcome(tokens: list[int], **fields) -> Outcome:
    visit = Visit(
        number=0, entry=0, fate=Fate.STAYS, after_s=0.0, over_http=False, stream=True, priority=0, cache_salt=""
    )  # fmt: skip
    return Outcome(visit=visit, choices={0: said(tokens)}, **{"usage": (1, len(tokens))} | fields)


def said(tokens: list[int], **fields: Any) -> Choice:
    return Choice(**{"tokens": tokens, "text": "abc", "finish": "length"} | fields)


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
    right = {0: said(RIGHT)}
    assert flaws_in(outcome(RIGHT, complete=right), ENTRY, right, exact=True) == []
    assert flaws_in(outcome(RIGHT, complete={0: said([*RIGHT, 1])}), ENTRY, right, exact=True) == [Flaw.LOST]
    assert flaws_in(outcome(RIGHT, complete={0: said(RIGHT, text="abd")}), ENTRY, right, exact=True) == [Flaw.MISTOLD]
    assert flaws_in(outcome(RIGHT, changed=True), ENTRY, right, exact=True) == [Flaw.WRONG]


@pytest.mark.parametrize("usage", [(1, 5), (2, 6), None])
def test_a_whole_answer_that_counts_otherwise_is_mistold(usage: tuple[int, int] | None) -> None:
    right = {0: said(RIGHT)}
    assert flaws_in(outcome(RIGHT, usage=usage), ENTRY, right, exact=True) == [Flaw.MISTOLD]
    assert flaws_in(outcome(RIGHT, usage=usage, went_away=True), ENTRY, right, exact=True) == []


@pytest.mark.parametrize(
    ("got", "while_it_lasts", "at_its_end"),
    [
        ({}, None, None),
        ({"text": "ab", "finish": None}, None, Flaw.MISTOLD),
        ({"text": "ab"}, None, Flaw.MISTOLD),
        ({"text": "abd"}, Flaw.MISTOLD, Flaw.MISTOLD),
        ({"finish": "stop"}, Flaw.MISTOLD, Flaw.MISTOLD),
        ({"finish": None}, None, Flaw.MISTOLD),
        ({"logprobs": [-1.0]}, None, Flaw.MISTOLD),
        ({"logprobs": [-1.0, -2.5]}, Flaw.MISTOLD, Flaw.MISTOLD),
    ],
)
def test_right_tokens_with_something_else_beside_them_are_a_flaw(
    got: dict[str, Any], while_it_lasts: Flaw | None, at_its_end: Flaw | None
) -> None:
    right = said(RIGHT, logprobs=[-1.0, -2.0])
    mine = replace(right, **got)
    assert mine.flaw_beside(right, whole=False) is while_it_lasts
    assert mine.flaw_beside(right, whole=True) is at_its_end


def test_in_fast_numerics_only_counts_and_what_was_sent_are_judged() -> None:
    other, right = [5, 7, 8, 8, 8, 8], {0: said(RIGHT)}
    assert flaws_in(outcome(other, complete={0: said(other)}), ENTRY, right, exact=False) == []
    assert flaws_in(outcome(other, complete=right), ENTRY, right, exact=False) == [Flaw.WRONG]
    assert flaws_in(outcome(other[:5]), ENTRY, right, exact=False) == [Flaw.LOST]
    assert flaws_in(outcome([*other, 8]), ENTRY, right, exact=False) == [Flaw.DUPLICATED]
    assert flaws_in(outcome(other[:2], error="UNAVAILABLE"), ENTRY, right, exact=False) == []


def test_what_arrives_in_parts_is_put_together() -> None:
    one = outcome([])
    one.send()
    for part in (said([5], text="a", finish=None), said([], text="b", finish=None), said([7], logprobs=[-1.0])):
        one.take(0, part)
    assert one.choices == {0: Choice([5, 7], "ababc", [-1.0], "length")}


@pytest.mark.parametrize(
    ("text", "flaws"),
    [
        *((text, []) for text in ("x sel", "x ", "x", "x \ufffd", "x s\ufffd")),
        *((text, [Flaw.MISTOLD]) for text in ("x y", "x elf")),
    ],
)
def test_an_abort_may_bring_text_that_was_withheld(text: str, flaws: list[Flaw]) -> None:
    entry, right = replace(ENTRY, stop=("self", "\n\n")), {0: said(RIGHT, text="x ", finish="stop")}
    aborted = outcome(RIGHT, went_away=True)
    aborted.choices = {0: said(RIGHT[:3], text=text, finish="abort")}
    assert flaws_in(aborted, entry, right, exact=True) == flaws
    aborted.went_away, aborted.usage = False, (1, 3)
    assert flaws_in(aborted, entry, right, exact=True) == [Flaw.LOST], "nobody aborted it"


TOP = ((5, -0.5), (7, -1.5))  # alternatives to the one token


def over_http(**changed: Any) -> Outcome:
    """An answer of one token, which is none of the two best."""
    scored = completion_logprobs(cast(Tokenizer, None), [ScoredToken(token_id=9, logprob=-2.5, top=TOP)], len(TOP), as_ids=True)
    part = {"index": 0, "token_ids": [9], "text": "a", "finish_reason": "length", "logprobs": scored | changed}
    one = replace(outcome([]), choices={})
    _take({"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "choices": [part]}, one)
    return one


@pytest.mark.parametrize("top", [None, {}, {"token_id:5": -0.5}, {"token_id:5": -0.5, "token_id:7": -1.25, "token_id:9": -2.5}])
def test_alternatives_are_what_they_would_be_over_grpc(top: dict[str, float] | None) -> None:
    score = encode_logprob(TokenLogprob(9, -2.5, TOP))
    delta = generation_pb2.Delta(token_ids=[9], text="a", logprobs=[score], finish=common_pb2.FINISH_REASON_LENGTH)
    right = {0: Choice.of(delta)}
    assert flaws_in(over_http(), ENTRY, right, exact=True) == []
    assert flaws_in(over_http(top_logprobs=[top]), ENTRY, right, exact=True) == [Flaw.MISTOLD]
    assert flaws_in(over_http(top_logprobs=None), ENTRY, right, exact=True) == [Flaw.MISTOLD]
