"""Unions of a JSON schema: a branch has the tag that the union names, and where branches overlap any of them will do."""

from __future__ import annotations

import json
import tracemalloc
from time import thread_time
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from jdisagg.text.schema_annotations import readable
from jdisagg.text.schema_refs import Root
from jdisagg.text.schema_tags import looks, missing_tags
from tests.unit.text.grammar_rig import demo_grammars, demo_tokenizer, schema


class Black(BaseModel):
    pet: Literal["cat"] = "cat"
    color: Literal["black"] = "black"
    lives: int = 9


class White(BaseModel):
    pet: Literal["cat"] = "cat"
    color: Literal["white"] = "white"


class Dog(BaseModel):
    pet: Literal["dog"] = "dog"
    name: str


Cat = Annotated[Black | White, Field(discriminator="color")]


class Owner(BaseModel):
    first: Annotated[Cat | Dog, Field(discriminator="pet")]
    others: list[Annotated[Black | Dog, Field(discriminator="pet")]] = []


def takes(asked: Any, answer: str) -> bool:
    """Whether `answer` begins one that is of the schema."""
    matcher = demo_grammars().matcher(schema(json.dumps(asked)))
    matcher.advance(demo_tokenizer().encode(answer, add_special_tokens=False))
    return matcher.error == ""


@pytest.mark.parametrize(
    ("answer", "is_read"),
    [
        ('{"first":{"pet":"dog","name":"x"}}', True),
        ('{"first":{"pet":"cat","color":"black","lives":1},"others":[{"pet":"dog","name":"x"}]}', True),
        ('{"first":{"pet":"cat","color":"white"}}', True),
        ('{"first":{"name"', False),
        ('{"first":{"color"', False),
        ('{"first":{"pet":"cat","lives"', False),
        ('{"first":{"pet":"cat"}', False),
        ('{"first":{"pet":"dog","name":"x"},"others":[{}', False),
        ('{"first":{"pet":"dog","name":"x"},"others":[{"lives"', False),
    ],
)
def test_what_pydantic_tells_apart_by_a_tag_has_the_tag(answer: str, is_read: bool) -> None:
    assert takes(Owner.model_json_schema(), answer) is is_read
    if is_read:
        Owner.model_validate_json(answer)


def test_a_tag_that_is_there_is_required_once_wherever_its_branch_stands() -> None:
    tagged = {"properties": {"t/~": {"const": 1}, "a": True}, "required": ["a"]}
    for union in ("oneOf", "anyOf"):
        asked = {
            "discriminator": {"propertyName": "t/~"},
            union: [
                {"$ref": "#/$defs/a~1b", "description": "d"},
                {"$ref": "#/definitions/%7E0%20"},
                {"allOf": [tagged, {"properties": {"b": True}}]},
                {"properties": {"t/~": True}, "required": ["t/~"]},
                {"properties": {"b": True}},  # has no such property
                {"$ref": "#"},
                {"$ref": "#/nowhere/at/all"},
                {"$ref": "#/$defs/a~1b/required/0"},
                {"$ref": "elsewhere.json#/a"},
                {"$ref": 5},
                True,
            ],
            "$defs": {"a/b": tagged},
            "definitions": {"~ ": {"properties": {"t/~": {"const": 2}}}},
        }
        before = json.dumps(asked)
        changed = readable(asked)
        assert json.dumps(asked) == before, "a copy"
        first, second, third, *others = changed.pop(union)
        assert changed["$defs"]["a/b"] == third["allOf"][0] == tagged | {"required": ["a", "t/~"]}
        assert changed["definitions"]["~ "] == {"properties": {"t/~": {"const": 2}}, "required": ["t/~"]}
        assert [first, second, *others] == [asked[union][0], asked[union][1], *asked[union][3:]]
        assert third["allOf"][1] == {"properties": {"b": True}}


@pytest.mark.parametrize(
    "odd",
    [
        {"oneOf": [{"properties": {"t": True}}]},
        {"discriminator": "t", "oneOf": [{"properties": {"t": True}}]},
        {"discriminator": {"propertyName": 5}, "oneOf": [{"properties": {"t": True}}]},
        {
            "discriminator": {"propertyName": "t"},
            "oneOf": [{"properties": {"t": True}, "required": "a"}, {"properties": ["t"]}],
        },
        {"discriminator": {"propertyName": "t"}, "anyOf": [{"properties": {"t": True}, "required": False}]},
        {"discriminator": {"propertyName": "t"}, "oneOf": "t"},
        {"const": {"discriminator": {"propertyName": "t"}, "oneOf": [{"properties": {"t": True}}]}},
        {"discriminator": {"propertyName": "t"}, "allOf": [{"properties": {"t": True}}]},
    ],
    ids=json.dumps,
)
def test_where_no_union_names_a_tag_nothing_is_required(odd: dict[str, Any]) -> None:
    assert readable(odd) == odd


@pytest.mark.parametrize("others", [0, 40_000])
def test_of_very_many_unions_that_share_branches_not_all_are_looked_at(others: int) -> None:
    unions = [{"discriminator": {"propertyName": f"t{i}"}, "oneOf": [{"$ref": "#/$defs/all"}]} for i in range(2000)]
    branches = [{"properties": {f"t{i}": True}} for i in range(0 if others else 2000)]
    began_s = thread_time()
    found = missing_tags(Root({"$defs": {"all": {"oneOf": [*branches, *[True] * others]}}, "anyOf": unions}))
    assert thread_time() - began_s < 1.0
    assert len(found) < 20
    assert bool(found) is (others == 0)


def test_several_schemas_may_share_what_is_looked_at() -> None:
    def union(number: int) -> dict[str, Any]:
        branches = [{"properties": {"t": True}, "title": f"{i}"} for i in range(number)]
        return {"discriminator": {"propertyName": "t"}, "oneOf": branches}

    left = looks()
    assert [len(missing_tags(Root(union(number)), left)) for number in (10, 5000, 5000)] == [10, 5000, 5000]
    assert 0 < len(missing_tags(Root(union(10_000)), left)) < 2**14 - 10_000
    assert missing_tags(Root(union(10)), left) == {}
    assert readable(union(10), left) == union(10)
    assert len(missing_tags(Root(union(10)))) == 10, "one alone has them all"


def test_a_long_reference_is_followed_once() -> None:
    name = "%7E0" * 25_000
    unions = [{"discriminator": {"propertyName": "t"}, "oneOf": [{"$ref": "#/$defs/a"}]} for _ in range(5000)]
    defs = {"a": {"$ref": f"#/$defs/{name}"}, "~" * 25_000: {"properties": {"t": True}}}
    began_s = thread_time()
    assert list(missing_tags(Root({"$defs": defs, "anyOf": unions})).values()) == [["t"]]
    assert thread_time() - began_s < 1.0


@pytest.mark.parametrize(
    "union",
    [
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"oneOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/I"}]},
        {"oneOf": [{"type": "number"}, {"type": "integer"}], "x-guidance": {"whitespace_pattern": ""}},
        {"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "type": ["array", "integer"]},
    ],
    ids=json.dumps,
)
def test_branches_that_overlap_are_served_as_any_of_them(union: dict[str, Any]) -> None:
    asked = union | {"$defs": {"N": {"type": "number"}, "I": {"type": "integer"}}}
    assert takes(asked, "5")
    assert not takes(asked, '"')


def test_a_list_that_is_referred_to_is_not_looked_through_each_time() -> None:
    union = {"discriminator": {"propertyName": "t"}, "anyOf": [{"$ref": "#/x"}]}
    root = union | {"x": [*[0] * 100_000, *({"$ref": "#/x"} for _ in range(100))]}
    tracemalloc.start()
    try:
        assert missing_tags(Root(root)) == {}
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 2**20, "a copy of the list has nearly as much"
