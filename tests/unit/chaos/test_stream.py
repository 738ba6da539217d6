"""What a client's arrivals say about its waits, and what a cell of the drill's table lets pass."""

from dataclasses import replace
from typing import Any

import pytest
from chaos_kit.catalogue import Entry
from chaos_kit.cell import Cell, Ending
from chaos_kit.choice import Choice
from chaos_kit.drill_report import cell_line, cell_table
from chaos_kit.stages import MAX_MODEL_LEN, SCENES, SUBJECT_OUTPUT, SUBJECT_TOKENS, Stage, everything_asked
from chaos_kit.stream import LOST, Stream

RIGHT = Choice([5, 7, 9, 11, 13], "abcde", finish="length")


def stream(*times_s: float, **fields) -> Stream:
    entry = Entry(prompt=(1,), sampling={"max_tokens": len(RIGHT.tokens)})
    count = len(times_s)
    finish = "length" if count == len(RIGHT.tokens) else None
    choice = Choice(RIGHT.tokens[:count], RIGHT.text[:count], finish=finish)
    return Stream(name="x", entry=entry, choice=choice, times_s=list(times_s), **fields)


def test_the_gap_begins_with_the_last_token_before_the_blow() -> None:
    assert stream(1.0, 4.0, 4.5, 6.0, 6.1).gap_s(4.6) == pytest.approx(1.5)
    assert stream(1.0, 4.0, 4.5, 6.0, 6.1).gap_s(5.9) == pytest.approx(1.5)


def test_without_a_token_before_the_blow_the_gap_begins_with_the_blow() -> None:
    assert stream(4.0, 4.5).gap_s(1.0) == pytest.approx(3.0)


def test_a_token_that_was_on_its_way_does_not_end_the_gap() -> None:
    assert stream(1.0, 1.02, 3.0, 3.1).gap_s(1.01) == pytest.approx(1.98)
    assert stream(1.0, 1.02, 3.0, 3.1).tokens_before_gap(1.01) == 2


def test_a_wait_that_was_over_before_the_blow_is_no_gap() -> None:
    assert stream(1.0, 9.0, 9.1).gap_s(9.05) == pytest.approx(0.1)
    assert stream(1.0, 9.0, 9.1).tokens_before_gap(9.05) == 2
    assert stream(1.0, 9.0).gap_s(9.5) == 0.0


def test_an_error_behind_wrong_tokens_is_wrong() -> None:
    assert stream(1.0, 2.0, 3.0, 4.0, 5.0).became(RIGHT) == "exact"
    assert stream(1.0, 2.0).became(RIGHT) == "LOST"  # ended well, and short
    assert stream(1.0, 2.0, error=LOST).became(RIGHT) == LOST
    assert stream(1.0, 2.0, error="ABORTED").became(replace(RIGHT, tokens=[5, 8, 9, 11, 13])) == "WRONG"
    assert stream(1.0, 2.0, 3.0, 4.0, 5.0).became(replace(RIGHT, finish="stop")) == "MISTOLD"


def cell(victim: str = "D", blow: str = "kill -9", **fields: Any) -> Cell:
    known: dict[str, Any] = {"reached": True, "others": {"exact": 2}}
    ending = Ending(became=fields.pop("became", "exact"))
    return Cell(stage="decoding", victim=victim, blow=blow, held_by="", ending=ending, **(known | fields))


def test_only_the_streams_of_a_killed_router_may_be_lost() -> None:
    lost = {"became": "lost with its router", "again": "exact"}
    assert cell().ok
    assert cell("router", **lost).ok
    assert cell("router", **lost, others={"lost with its router": 2}).ok
    assert not cell("router", "SIGSTOP", **lost).ok
    assert not cell("D", **lost).ok
    assert not cell("router", **(lost | {"again": "UNAVAILABLE"})).ok


@pytest.mark.parametrize(
    "fields",
    [
        {"reached": False},
        {"became": "WRONG"},
        {"became": "ABORTED"},
        {"leaks": ("P1: leases = 1",)},
        {"others": {"exact": 1, "WRONG": 1}},
        {"others": {"exact": 1, "DEADLINE_EXCEEDED": 1}},
        {"others": {"lost with its router": 1}},
    ],
)
def test_a_cell_that_was_missed_or_wrong_or_leaked_is_not_ok(fields: dict[str, Any]) -> None:
    assert not cell(**fields).ok


def test_a_cell_is_told_on_one_level() -> None:
    told = cell(became="ABORTED").as_json()
    assert (told["stage"], told["became"], told["others"], told["ok"]) == ("decoding", "ABORTED", {"exact": 2}, False)
    assert "ending" not in told


def test_a_cell_is_one_line_and_one_place_in_the_table() -> None:
    ending = Ending(became="exact", gap_s=0.25, detail="replayed", went_on="P1 > D2 other_prefill")
    told = replace(cell(), ending=ending, struck="D1", seen="decoding", again="exact", at_rest_s=1.5)
    assert cell_line(told) == (
        "ok  kill -9 of D (D1), decoding: exact 250 ms; KV from > ended on: P1 > D2 other_prefill; "
        "seen 'decoding' at try 5; others 2 exact; left: nothing after 1.5 s; asked again: exact; replayed"
    )
    table = cell_table([told, cell(victim="P", became="ABORTED")])
    assert "exact 250 ms" in table
    assert "ABORTED (!)" in table
    assert table.endswith("1 of 2 cells as they must be")


def test_every_state_has_a_scene_and_every_question_another_prompt() -> None:
    assert set(SCENES) == set(Stage)
    asked = everything_asked()
    assert len({entry.prompt for entry in asked}) == len(asked)
    assert all(len(entry.prompt) + entry.max_tokens <= MAX_MODEL_LEN for entry in asked)
    assert SUBJECT_TOKENS + SUBJECT_OUTPUT <= 512
