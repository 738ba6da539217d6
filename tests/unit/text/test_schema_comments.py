"""Comments are left out of a schema wherever it has them, and of nothing else."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.text import schema_comments
from jdisagg.text.schema_annotations import readable
from jdisagg.text.schema_comments import COMMENTS, uncommented
from jdisagg.text.schema_refs import values_in

MOST = 2**16
SAID: dict[str, Any] = {
    "title": "t",
    "description": "d",
    "default": {"title": 1},
    "examples": [{"type": "null"}],
    "$comment": "c",
}
KEYS = [*COMMENTS, "type", "required", "enum", "const", "properties", "items", "anyOf", "pattern", "format", "x-order", "$id"]
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(KEYS), one, max_size=3),
    max_leaves=8,
)
PLAIN = st.sampled_from(["type", "format", "minimum", "required"])


def bare(schema: Any) -> Any:
    [one] = uncommented([schema], MOST)
    return one


@pytest.mark.parametrize("name", ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
def test_names_are_no_comments(name: str) -> None:
    named: dict[str, Any] = {key: {"type": "string"} | SAID for key in (*COMMENTS, "required", "pattern", name)}
    assert bare({name: named} | SAID) == {name: {key: {"type": "string"} for key in named}}


def test_comments_go_wherever_a_schema_stands() -> None:
    inner: dict[str, Any] = {"type": "string"}
    for place in ("allOf", "anyOf", "oneOf", "prefixItems"):
        assert bare({place: [inner | SAID, True]}) == {place: [inner, True]}
    for place in ("items", "additionalProperties", "propertyNames"):
        assert bare({place: inner | SAID}) == {place: inner}
    assert bare({"$ref": "#/$defs/a", **SAID, "$defs": {"a": SAID}}) == {"$ref": "#/$defs/a", "$defs": {"a": {}}}


def test_data_and_keywords_of_others_stay() -> None:
    for kept in (
        {"const": SAID, "enum": [SAID], "x-guidance": SAID, "discriminator": SAID},
        {"items": False},
        {"not": [5]},
        True,
        {},
    ):
        assert bare(kept) == kept


@pytest.mark.parametrize("reference", ["#/default", "#/items/def%61ult/a", "http://a/b#/examples/0", "#/$defs/title"])
def test_what_a_reference_may_lead_into_stays(reference: str) -> None:
    asked = {"properties": {"a": {"enum": [{"$ref": reference}]}}, **SAID}
    assert bare(asked) == asked
    assert uncommented([asked, {"title": "t", "type": "null"}], MOST) == [asked, {"type": "null"}]


LONG: list[dict[str, Any]] = [
    {"anyOf": [{}] * MOST},
    {"enum": [None] * MOST},
    {"const": [[None] * MOST]},
    {"properties": {str(number): {} for number in range(MOST)}},
    {"$ref": "%41" * MOST},
    {"const": {"$ref": "/" * MOST}},
]


@pytest.mark.parametrize("long", LONG, ids=lambda long: next(iter(long)))
def test_what_is_too_long_in_any_case_is_not_looked_through(long: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(schema_comments, "values_in", lambda value: (seen.append(1) or one for one in values_in(value)))
    asked = [{"title": "t"} | long, {"title": "t"}]
    assert uncommented(asked, MOST) is asked
    assert len(seen) <= MOST + 1


def test_nothing_that_is_short_is_too_long() -> None:
    asked = {"enum": [0] * ((MOST - 10) // 2), "title": "t" * MOST}
    assert bare(asked) == {"enum": asked["enum"]}


def schemas(data: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        by_name = st.dictionaries(st.sampled_from(KEYS), one, max_size=3)
        return st.fixed_dictionaries(
            {},
            optional={"properties": by_name, "$defs": by_name, "allOf": st.lists(one, max_size=2), "items": one}
            | {"const": data, "enum": st.lists(data, max_size=2), "default": data, "x-order": data, "title": data},
        )

    return st.recursive(st.booleans() | st.builds(dict), of, max_leaves=8)


def data_in(schema: Any) -> list[Any]:
    """Of each schema, in their order, what is no schema, and the names in it. By hand: nothing of `schema_walk` is used."""
    if not isinstance(schema, dict):
        return [schema]
    found: list[Any] = [schema[key] for key in ("const", "enum", "x-order") if key in schema]
    for key in ("properties", "$defs"):
        found += [list(schema.get(key, ()))]
        for one in schema.get(key, {}).values():
            found += data_in(one)
    for one in (*schema.get("allOf", ()), *([schema["items"]] if "items" in schema else ())):
        found += data_in(one)
    return found


@given(schemas(DATA))
def test_data_names_and_booleans_come_through_as_they_are(schema: Any) -> None:
    before, data = deepcopy(schema), data_in(schema)
    assert data_in(bare(schema)) == data
    assert data_in(readable(schema)) == data
    assert schema == before, "what came is changed"
    assert list(islice(values_in(bare(schema)), 1))


@given(schemas(DATA))
def test_twice_is_no_more_than_once(schema: Any) -> None:
    assert bare(bare(schema)) == bare(schema)
    assert readable(readable(schema)) == readable(schema)
