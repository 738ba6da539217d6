"""What says nothing in a JSON schema is left out, wherever a schema stands, and nothing else is."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from llguidance import LLMatcher

from jdisagg.core.errors import InvalidRequest
from jdisagg.text.schema_annotations import KNOWN_FORMATS, readable, readable_text
from tests.unit.text.grammar_rig import demo_grammars, demo_tokenizer, schema

# Of JSON Schema (2020-12, validation, 7.3), of OpenAPI's registry and of pydantic.
OTHER_FORMATS = [
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "regex"),
    *("relative-json-pointer", "password", "byte", "binary", "int64", "double", "decimal", "path", "file-path", "url", ""),
]
LIMITS = [2**63 - 1, 2**63, 2**64 - 1, 3.4028234663852886e38, 1.7976931348623157e308]  # of int64, uint64, float32, float64
NOTHING: list[dict[str, Any]] = [
    {"format": "password"},
    {"uniqueItems": False},
    *({"propertyNames": names} for names in (True, {}, {"type": "string"}, {"type": "string", "title": "t"})),
    *({name: {}} for name in ("dependentRequired", "dependentSchemas", "dependencies")),
    *({name: value} for name in ("unevaluatedProperties", "unevaluatedItems") for value in (True, {})),
    *({name: None} for name in ("type", "required", "properties", "enum", "items", "format", "additionalProperties", "$ref")),
    *({name: None} for name in ("pattern", "minimum", "maxLength", "anyOf", "allOf", "not", "if", "propertyNames")),
    *({"minimum": -(2**63)}, {"exclusiveMinimum": -LIMITS[-1]}, {"maximum": 2**63 - 1}, {"exclusiveMaximum": LIMITS[-1]}),
]
PLACES = [
    '{"type":"object","properties":{"a":X}}',
    '{"patternProperties":{"^a":X}}',
    '{"additionalProperties":X}',
    '{"items":X}',
    '{"prefixItems":[true,X]}',
    '{"items":[X],"additionalItems":X}',
    '{"anyOf":[X,{"type":"null"}]}',
    '{"allOf":[X]}',
    '{"oneOf":[X]}',
    '{"$ref":"#/$defs/a","$defs":{"a":X}}',
    '{"$ref":"#/definitions/a","definitions":{"a":{"items":{"properties":{"a":X}}}}}',
    '{"properties":{"format":X,"properties":{"properties":{"uniqueItems":X}}}}',
    "X",
]
KEPT: list[Any] = [
    {"enum": [{"format": "password", "uniqueItems": False}]},
    {"const": {"items": {"format": "password"}, "uniqueItems": False}},
    {"type": "object", "default": {"format": "password"}, "examples": [{"uniqueItems": False}]},
    {"properties": {"format": {"const": "password"}, "uniqueItems": False}, "required": ["uniqueItems"]},
    {"x-guidance": {"format": "password"}, "uniqueItems": True},
    {"format": 5, "const": None, "default": None, "items": {"enum": [None], "properties": {"format": None}}},
    {"anyOf": [None, {"const": {"required": None}}], "x-guidance": {"format": None}},
    {"dependencies": {"format": ["uniqueItems"]}, "items": False},
    *({"propertyNames": names} for names in (False, {"pattern": "^a"}, {"enum": [1]}, {"type": "integer"}, {"maxLength": 3})),
    *({name: value} for name in ("unevaluatedProperties", "unevaluatedItems") for value in (False, {"type": "string"})),
    {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": False}},
    {"properties": {"minimum": {"const": -1e300}, "propertyNames": True}, "enum": [{"maximum": 1e300}]},
    {"minimum": 1e300, "maximum": -1e300, "exclusiveMinimum": 2**63, "exclusiveMaximum": -(2**63)},  # exclude almost all
    {"minimum": -(2**53), "maximum": 2**53, "exclusiveMinimum": -9.2e18, "exclusiveMaximum": 9.2e18},
    {"minimum": True, "maximum": "1e300"},
    *({"type": kind, "maximum": 2**63 - 1, "exclusiveMaximum": 1e300} for kind in ("integer", ["integer", "null"])),
    *({"format": name} for name in sorted(KNOWN_FORMATS)),
]


def refusal(text: str) -> str:
    """Of the library itself; "" = none."""
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))


def test_the_library_knows_these_formats_and_not_the_others() -> None:
    for name in KNOWN_FORMATS:
        assert refusal(json.dumps({"type": "string", "format": name})) == ""
    for name in OTHER_FORMATS:
        assert refusal(json.dumps({"type": "string", "format": name})).startswith("Unknown format")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nothing", NOTHING, ids=lambda nothing: next(iter(nothing)))
def test_wherever_a_schema_stands_it_compiles_without_what_says_nothing(place: str, nothing: dict[str, Any]) -> None:
    text = place.replace("X", json.dumps({"title": "t"} | nothing | {"description": "d"}))
    assert refusal(text) != "", "the library takes it by itself"
    assert json.loads(readable_text(text)) == json.loads(place.replace("X", '{"title":"t","description":"d"}'))
    demo_grammars().compile(schema(text))


@pytest.mark.parametrize("kept", KEPT, ids=json.dumps)
def test_values_names_and_what_says_something_stay(kept: dict[str, Any]) -> None:
    assert readable(kept) == kept
    text = json.dumps(kept)
    assert readable_text(text) == text


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"], ["number", "null"]], ids=str)
@pytest.mark.parametrize("limit", [2**31 - 1, 2**53 - 1, *LIMITS])
def test_numbers_bounded_by_their_type_alone_are_served(kind: Any, limit: float) -> None:
    for low, high in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
        for bounds in ({low: -limit, high: limit}, {low: 0, high: limit}, {low: -limit, high: 7}, {low: -limit}, {high: limit}):
            compiled, text = demo_grammars(), json.dumps({"type": kind} | bounds)
            for answer, is_whole in (("5", True), ("-5", bounds.get(low) != 0), ("10", bounds.get(high) != 7)):
                matcher = compiled.matcher(schema(text))
                matcher.advance(demo_tokenizer().encode(answer, add_special_tokens=False))
                assert (matcher.error == "") is is_whole, (text, answer)


def test_properties_keep_their_order_and_what_is_beside_a_format_counts() -> None:
    asked = {
        "type": "object",
        "properties": {
            "z": {"type": "string", "format": "password", "maxLength": 2},
            "a": {"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 1, "uniqueItems": False},
            "m": {"type": "string", "format": "date"},
        },
        "required": ["a", "z", "m"],
        "additionalProperties": False,
    }
    compiled = demo_grammars()
    for answer, is_whole in [
        ('{"z":"ab","a":[1],"m":"2026-01-31"}', True),
        ('{"a":[1],"z":"ab","m":"2026-01-31"}', False),
        ('{"z":"abc","a":[1],"m":"2026-01-31"}', False),
        ('{"z":"ab","a":[1],"m":"2026-01-32"}', False),
    ]:
        matcher = compiled.matcher(schema(json.dumps(asked)))
        matcher.advance(demo_tokenizer().encode(answer, add_special_tokens=False))
        assert (matcher.error == "") is is_whole, answer


@pytest.mark.parametrize(
    "text", ['{"uniqueItems": true}', '{"format": "password"', '{"format": "password", "const": NaN}', "5"]
)
def test_what_is_refused_otherwise_still_is(text: str) -> None:
    with pytest.raises(InvalidRequest):
        demo_grammars().compile(schema(text))


def test_what_is_too_deep_to_read_is_left_to_the_library() -> None:
    texts = ['{"items":' * 7000 + '{"format":"password"}' + "}" * 7000, "[" * 60_000 + '"format"']
    left: list[bool] = []
    before = threading.stack_size(2**20)  # as in `grammar_checker`
    try:
        thread = threading.Thread(target=lambda: left.extend(readable_text(text) == text for text in texts))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert left == [True, True]
