"""What the library reads otherwise than a JSON schema means it lets no answer through that the schema excludes."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from jdisagg.text.grammar_tokenizer import read_tokenizer
from jdisagg.text.schema_annotations import readable_text
from jdisagg.text.schema_mends import mended, mended_pattern
from tests.unit.text.grammar_rig import demo_vocabulary

TEXTS = ['a"b', "a\\b", "ab", '"', "\\", "a\nb", "\x01", "a[x]", 'a["]', "1", "abc,", ""]
MENDED = [
    r'^[^"]*$',
    r"^[^\\]*$",
    r'^[^"\\]*$',
    r"^[^/\\]+$",
    r'^[^"\n]*$',
    r"^[\u0000-\u001f]$",
    r"^[\x00-!#-~]+$",
    r'^\w+\[[^\]"]*\]$',
    r'^[^]"]+$',
    r'^(?:[^"]|a)*$',
    r'^a?[^"]{1,3}$',
    r"^[^A-z]$",
    r'^[^\u0000-\u001f"\\]*$',
    r'^[^\W"]+$',
]
WHOLE = [r"^[a-z]*$", r"^[^a]*$", r"^[\s\S]*$", r"^[^\w.]+$", r"^\[[a-z]\]$", r"^[-a-zA-Z0-9_.]+$", r"^a\\[bc]$"]
NO_PATTERNS = ["^[a", "\\", r"\p{"]
NUMBERS = [-10.5, -10, -2, -1.5, -1, -0.5, 0, 0.25, 0.5, 0.999, 1, 1.5, 2, 10, 10.25]
AS_TEXT = [*map(str, NUMBERS), "0.0", "-0.0", "1.0", "-1.0", "2.0", "-2.0", "10.0", "-10.0", "0.1", "1.25", "-1.2", "-10.2"]


def accepts(tokenizer: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert matcher.get_error() == ""
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    demo = demo_vocabulary()
    return read_tokenizer(demo.tokenizer_json, demo.size, demo.eos_token_ids)


@pytest.mark.parametrize("pattern", [*MENDED, *WHOLE])
def test_a_pattern_lets_through_what_it_means(tokenizer: LLTokenizer, pattern: str) -> None:
    schema = mended({"type": "string", "pattern": pattern})
    means = re.compile(pattern)
    for text in TEXTS:
        assert accepts(tokenizer, schema, json.dumps(text)) == (means.search(text) is not None), text


def test_the_library_alone_still_does_not(tokenizer: LLTokenizer) -> None:
    """Else `schema_mends` has had its day."""
    assert accepts(tokenizer, {"type": "string", "pattern": r'^[^"]*$'}, json.dumps('a"b'))
    assert accepts(tokenizer, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0")


@pytest.mark.parametrize("pattern", [*WHOLE, *NO_PATTERNS])
def test_a_pattern_with_nothing_to_mend_stays_as_it_is(pattern: str) -> None:
    assert mended_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", [*MENDED, *WHOLE, *NO_PATTERNS, r"\P{P}", r"\pLx[\P{Po}]"])
def test_what_is_mended_stays_as_it_is(pattern: str) -> None:
    assert mended_pattern(mended_pattern(pattern)) == mended_pattern(pattern)


def test_a_class_by_its_property_is_mended_too(tokenizer: LLTokenizer) -> None:
    for pattern in (r"^\P{P}$", r"^[\P{P}]$", r"^\PP$"):
        schema = mended({"type": "string", "pattern": pattern})
        assert accepts(tokenizer, schema, '"a"')
        assert not accepts(tokenizer, schema, '"\\""')
        assert not accepts(tokenizer, schema, '"\\\\"')


def test_numbers_close_to_the_excluded_bound_are_there(tokenizer: LLTokenizer) -> None:
    schema = mended({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-10})
    assert accepts(tokenizer, schema, "0.0000000001")
    assert not accepts(tokenizer, schema, "0")


def test_names_by_pattern_are_mended_too(tokenizer: LLTokenizer) -> None:
    schema = mended({"type": "object", "patternProperties": {'^[^"]$': {"const": 1}}, "additionalProperties": False})
    assert accepts(tokenizer, schema, '{"a":1}')
    assert not accepts(tokenizer, schema, '{"\\"":1}')


def test_classes_within_a_class_are_mended_as_one() -> None:
    assert mended_pattern('^[a[^"]]$') == '^[[a[^"]]&&[^\\r]]$'
    assert mended_pattern('[^[:alpha:]"]') == '[[^[:alpha:]"]&&[^\\r]]'


def test_an_excluded_bound_is_excluded(tokenizer: LLTokenizer) -> None:
    kinds = list(product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")))
    for low, high in product(NUMBERS, NUMBERS):
        if not low < high < low + 2:
            continue
        for lowest, highest in kinds:
            schema = {"type": "number", lowest: low, highest: high}
            for text in AS_TEXT:
                number = float(text)
                above = number >= low if lowest == "minimum" else number > low
                below = number <= high if highest == "maximum" else number < high
                assert (above and below) or not accepts(tokenizer, mended(schema), text), (schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": ["null", "integer"], "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": "0", "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": True, "maximum": 1.5},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0},
        {"pattern": 5, "patternProperties": []},
    ],
)
def test_what_is_read_well_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert mended(schema) is schema


def test_the_tighter_of_two_bounds_counts() -> None:
    schema = {"type": "number", "minimum": 0.25, "exclusiveMinimum": 0, "maximum": 0.5}
    assert mended(schema) == {"type": "number", "minimum": 0.25, "maximum": 0.5}
    schema = {"type": "number", "maximum": -1, "exclusiveMaximum": -1, "minimum": -1.5}
    assert mended(schema) == {"type": "number", "maximum": -1.000000001, "minimum": -1.5}


@pytest.mark.parametrize("place", ['{"properties":{"a":X}}', '{"items":[X]}', '{"$defs":{"a":{"anyOf":[X]}}}', "X"])
def test_a_schema_is_mended_wherever_it_stands(place: str) -> None:
    for one in ({"pattern": '[^"]'}, {"patternProperties": {'[^"]': True}}, {"exclusiveMaximum": 1, "minimum": 1}):
        given = place.replace("X", json.dumps(one))
        assert json.loads(readable_text(given)) == json.loads(place.replace("X", json.dumps(mended(one))))
    assert mended({"exclusiveMaximum": 1, "minimum": 0.5}) == {"exclusiveMaximum": 1, "minimum": 0.5}
