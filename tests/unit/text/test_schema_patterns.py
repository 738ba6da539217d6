"""Patterns with look-around stand in nobody's way where a format or another branch says enough, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.text.schema_annotations import readable
from jdisagg.text.schema_patterns import has_look_around
from tests.unit.text.schema_rig import is_refused, takes

AHEAD = "^(?!a)b"
# As zod 4 and pydantic 2.13 write them.
EMAIL = {
    "type": "string",
    "format": "email",
    "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}
DURATION = {
    "type": "string",
    "format": "duration",
    "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
}
HOSTNAME = {
    "type": "string",
    "format": "hostname",
    "pattern": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9-]{1,63})*\.?$",
}
TEXT = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
NUMBER, NULL = {"type": "number"}, {"type": "null"}
UNKNOWN = "look-around"


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [(EMAIL, "a@b.de", "a.de"), (DURATION, "P1DT2H", "1 day"), (HOSTNAME, "a.b-c.de", "a b")]
)
def test_beside_a_format_that_is_known_the_format_alone_counts(schema: dict[str, Any], good: str, bad: str) -> None:
    places: list[tuple[Any, Any]] = [
        (schema, str),
        ({"type": "object", "properties": {"pattern": schema}, "required": ["pattern"]}, lambda text: {"pattern": text}),
        ({"$ref": "#/$defs/pattern", "$defs": {"pattern": schema}}, str),
        ({"allOf": [schema, {"maxLength": 40}]}, str),
        ({"anyOf": [schema, NULL]}, str),
        ({"type": "array", "items": schema}, lambda text: [text]),
    ]
    for asked, answer in places:
        for text, is_taken in ((good, True), (bad, False)):
            value = answer(text)
            assert takes(asked, f'"{value}"' if isinstance(value, str) else value) is is_taken, (asked, value)


def test_a_pattern_without_look_around_still_counts_beside_a_format() -> None:
    asked = {"type": "string", "format": "date", "pattern": "^2024-"}
    assert takes(asked, '"2024-01-31"')
    assert not takes(asked, '"2025-01-31"')


@pytest.mark.parametrize("asked", [{}, {"format": "password"}, {"format": "unknown"}, {"format": None}, {"minLength": 2}])
def test_a_pattern_that_alone_says_what_is_asked_for_is_refused(asked: dict[str, Any]) -> None:
    assert is_refused({"type": "string", "pattern": AHEAD} | asked, UNKNOWN)


def test_a_branch_that_cannot_be_served_is_left_out_where_another_can() -> None:
    referred: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [TEXT, NUMBER]}}}
    for asked in ({"anyOf": [NUMBER, TEXT]}, {"anyOf": [NUMBER, TEXT, NULL]}, referred):
        assert takes(asked, "12.5")
        assert not takes(asked, '"12.5"')
    assert takes({"anyOf": [NUMBER, TEXT, NULL]}, "null")
    assert takes({"anyOf": [TEXT, EMAIL]}, '"a@b.de"'), "of which the format is left"


@pytest.mark.parametrize(
    "asked",
    [
        {"anyOf": [TEXT]},
        {"anyOf": [TEXT, NULL]},
        {"anyOf": [TEXT, False]},
        {"anyOf": [TEXT, {"const": None}]},
        {"anyOf": [TEXT, {"type": "string", "pattern": AHEAD}]},
        {"oneOf": [TEXT, NUMBER]},
        {"allOf": [TEXT, NUMBER]},
        {"anyOf": [NUMBER, {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}]},
        {"type": "object", "properties": {"a": {"$ref": "#/anyOf/1"}}, "anyOf": [TEXT, {"type": "object"}]},
        {"x-guidance": {"coerce_one_of": False}, "anyOf": [NUMBER, TEXT]},
    ],
    ids=str,
)
def test_where_nothing_else_would_be_left_or_another_branch_might_take_more_it_is_refused(asked: dict[str, Any]) -> None:
    assert readable(asked) == asked


def test_data_and_names_are_no_patterns() -> None:
    kept: list[Any] = [
        {"const": EMAIL, "enum": [{"anyOf": [NUMBER, TEXT]}], "default": EMAIL, "examples": [EMAIL]},
        {"properties": {"format": {"const": "email"}, "pattern": {"enum": [AHEAD]}}, "required": ["pattern"]},
        {"format": "email", "pattern": {"(?=": 1}},
        {"anyOf": {"a": TEXT}},
        {"properties": True, "anyOf": [True, NUMBER]},
    ]
    for one in kept:
        assert readable(one) == one


@pytest.mark.parametrize("pattern", ["(?=a)", "(?!a)", "x(?<=a)", "x(?<!a)", r"\\(?=a)", "[(](?=a)", "[]](?!a)"])
def test_look_around_is_seen(pattern: str) -> None:
    assert has_look_around(pattern)
    assert is_refused({"type": "string", "pattern": pattern}, UNKNOWN)


@pytest.mark.parametrize("pattern", [r"\(?=a", r"\(?!a", "[(?=a]", "[^](?=a]", "(?:a)", "(?<a>b)", "(?i)a", "(?x)a #(?=b\n"])
def test_what_only_looks_like_it_is_not(pattern: str) -> None:
    assert not has_look_around(pattern)
    takes({"type": "string", "pattern": pattern}, '"a"')  # it compiles
    assert "pattern" in readable({"format": "email", "pattern": pattern})


@pytest.mark.parametrize("pattern", [None, 5, ["(?="], "[(?=", "[[](?=a)", "(?=a)["])
def test_of_what_is_no_expression_the_library_says_what_is_wrong(pattern: Any) -> None:
    assert not has_look_around(pattern)
