"""Of an object whose names are listed, an answer has these names and no others, with the values that it would have had."""

from __future__ import annotations

import enum
import json
from time import thread_time
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.text.schema_annotations import readable
from tests.unit.text.schema_rig import is_refused, takes

AB = {"type": "string", "enum": ["a", "b"]}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
UNKNOWN = "propertyNames"


def record(names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": INTEGER} | more


@pytest.mark.parametrize(
    "asked",
    [
        record(AB),
        record({"enum": ["a", "b", 5, None, "a"]}),
        record({"$ref": "#/$defs/C"}, **{"$defs": {"C": AB | {"title": "C", "description": "of it", "default": "a"}}}),
        record({"$ref": "#/$defs/C"}, **{"$defs": {"C": {"$ref": "#/$defs/D"}, "D": AB}}),
        {"$ref": "#/$defs/R", "$defs": {"R": record({"$ref": "#/$defs/C", "title": "t"}), "C": AB}},
        {"allOf": [record(AB), {"type": "object"}]},
    ],
    ids=str,
)
def test_listed_names_are_all_that_an_answer_may_have(asked: dict[str, Any]) -> None:
    for answer in ({"a": 1, "b": 2}, {"b": 2}, {}):
        assert takes(asked, answer), answer
    for answer in ({"a": "1"}, {"c": 1}, {"a": 1, "c": 1}, {"": 1}):
        assert not takes(asked, answer), answer


def test_what_is_required_is_and_what_any_value_may_have_has_any() -> None:
    assert takes(record(AB, required=["b"]), {"b": 1})
    assert not takes(record(AB, required=["b"]), {"a": 1})
    assert takes(record({"const": "a"}, additionalProperties=True), {"a": [None]})
    assert not takes(record({"const": "a"}, additionalProperties=None), {"b": [None]})
    assert takes({"type": "object", "propertyNames": AB}, {"b": {"c": 1}})
    assert not takes({"type": "object", "propertyNames": AB}, {"c": {"c": 1}})
    assert takes(record(AB, type=["object", "null"]), None)
    assert is_refused(record(AB, required=["c"]), "'c' is unsatisfiable")


@pytest.mark.parametrize(
    "asked",
    [
        {"allOf": [record(AB), {"properties": {"c": INTEGER}}]},
        {"$ref": "#/$defs/O", "$defs": {"O": {"type": "object", "properties": {"c": INTEGER}}}} | record(AB),
        record(AB, anyOf=[{"properties": {"c": INTEGER}, "required": ["a"]}, {"required": ["b"]}]),
        record(AB, minProperties=1),
    ],
    ids=str,
)
def test_what_stands_beside_it_counts_and_brings_no_other_names(asked: dict[str, Any]) -> None:
    assert takes(asked, {"a": 1})
    for answer in ({"c": 1}, {"a": 1, "c": 1}, {"a": "1"}):
        assert not takes(asked, answer)
    assert takes(asked, {}) is ("anyOf" not in asked and "minProperties" not in asked)


def test_properties_of_their_own_keep_their_schemas() -> None:
    asked = record(AB, properties={"b": TEXT})
    assert takes(asked, {"b": "x", "a": 1})
    for answer in ({"b": 1}, {"b": "x", "a": "x"}, {"c": 1}):
        assert not takes(asked, answer)
    closed = record(AB, properties={"b": TEXT}, additionalProperties=False)
    assert takes(closed, {"b": "x"})
    assert not takes(closed, {"a": 1})


def test_one_within_another_is_read_too() -> None:
    asked = record(AB, additionalProperties=record({"const": "propertyNames"}, required=["propertyNames"]))
    assert takes(asked, {"b": {"propertyNames": 1}})
    for answer in ({"b": {}}, {"b": {"a": 1}}, {"propertyNames": {"propertyNames": 1}}):
        assert not takes(asked, answer)


@pytest.mark.parametrize(
    "asked",
    [
        record(AB, patternProperties={"^a": TEXT}),
        record(AB, properties={"c": TEXT}),
        record(AB | {"minLength": 1}),
        record(AB | {"const": "a"}),
        record({"enum": []}),
        record({"enum": [1]}),
        record({"const": 1}),
        record({"type": "integer", "enum": ["a"]}),
        record({"type": "string", "minLength": 1}),
        record({"$ref": "#/$defs/none"}),
        record({"$ref": "#"}),
        record({"$ref": "#/$defs/C", "enum": ["a"]}, **{"$defs": {"C": AB}}),
        record({"$ref": "#/$defs/C"}, **{"$defs": {"C": {"$ref": "#/$defs/C"}}}),
        record({"enum": [str(number) for number in range(121)]}),
        record(AB, additionalProperties={"type": "string", "pattern": "x" * 2**15}),
        {"anyOf": [record(AB), {"$ref": "#/anyOf/0/additionalProperties"}]},
        {"anyOf": [record(AB), {"$ref": "#/anyOf/0/property%4eames"}]},
        {"allOf": [record({"$ref": "#/$defs/C"}), {"$id": "http://a/b", "$defs": {"C": TEXT}}], "$defs": {"C": AB}},
    ],
    ids=lambda asked: json.dumps(asked)[:100],
)
def test_where_that_could_not_be_exact_it_stays_refused(asked: dict[str, Any]) -> None:
    assert readable(asked) == asked
    assert is_refused(asked, UNKNOWN)


def test_copies_have_one_bound_for_all_that_is_nested() -> None:
    asked: Any = INTEGER
    for _ in range(12):
        asked = record({"enum": [f"n{number}" for number in range(10)]}, additionalProperties=asked)
    assert len(json.dumps(readable(asked))) < 2**17, "10 ** 12 schemas else"


def test_a_long_reference_is_followed_once_and_a_long_schema_not_read_for_each() -> None:
    name, keys = "%7E0" * 8000, {f"{number}": 0 for number in range(5000)}
    defs = {"a": {"$ref": f"#/$defs/{name}"}, "~" * 8000: {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/c"}, "c": keys}
    asked = {"allOf": [record({"$ref": f"#/$defs/{'ab'[number % 2]}"}) for number in range(2000)], "$defs": defs}
    began_s = thread_time()
    assert readable(asked) == asked
    assert thread_time() - began_s < 1.0


def test_names_of_an_enum_that_all_refer_to_have_one_bound() -> None:
    names = {"enum": [f"{number}".zfill(270) for number in range(120)]}
    asked = {"allOf": [{"propertyNames": {"$ref": "#/$defs/n"}} for _ in range(700)], "$defs": {"n": names}}
    assert len(json.dumps(readable(asked))) < 3 * len(json.dumps(asked))


def test_data_and_names_list_nothing() -> None:
    for one in (
        {"const": record(AB), "enum": [record(AB)], "default": record(AB), "examples": [record(AB)]},
        {"properties": {"propertyNames": AB, "additionalProperties": INTEGER}, "required": ["propertyNames"]},
        {"properties": {"a": True}, "propertyNames": False, "additionalProperties": True},
    ):
        assert readable(one) == one


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def test_what_pydantic_writes_is_served() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("M", by_color=(dict[Color, int], ...), by_name=(dict[Literal["x", "y"], str], ...))
    asked = model.model_json_schema()
    answer = {"by_color": {"blue": 1}, "by_name": {"x": "1", "y": "2"}}
    assert takes(asked, answer)
    model.model_validate(answer)
    for key, wrong in (("by_color", {"green": 1}), ("by_color", {"red": "1"}), ("by_name", {"z": "1"})):
        assert not takes(asked, answer | {key: wrong})


NAME = st.sampled_from(["a", "b", "c"])
KIND = st.sampled_from([INTEGER, TEXT, True, False])


@given(
    names=st.lists(NAME, min_size=1),
    properties=st.dictionaries(NAME, KIND),
    others=KIND,
    required=st.lists(NAME, max_size=1),
    answer=st.dictionaries(NAME, st.sampled_from([1, "x"])),
)
def test_no_answer_is_taken_that_the_schema_refuses(
    names: list[str], properties: dict[str, Any], others: Any, required: list[str], answer: dict[str, Any]
) -> None:
    asked = {"propertyNames": {"enum": names}, "properties": properties, "additionalProperties": others, "required": required}
    served = readable(asked)
    if "propertyNames" in served:
        return
    assert of_object(served, answer) == (set(answer) <= set(names) and of_object(asked, answer))


def of_object(schema: dict[str, Any], answer: dict[str, Any]) -> bool:
    """By 2020-12, of what is tried here."""
    listed, others = schema["properties"], schema["additionalProperties"]
    return set(schema["required"]) <= set(answer) and all(of(listed.get(name, others), one) for name, one in answer.items())


def of(schema: Any, value: Any) -> bool:
    return schema if isinstance(schema, bool) else isinstance(value, int if schema == INTEGER else str)
