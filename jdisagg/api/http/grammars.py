"""What the answer has to be: OpenAI's, vLLM's and SGLang's fields for it, all read as one grammar.

    response_format     {"type": "json_object"}, with a schema as Together, Fireworks and llama.cpp have it, or
                        {"type": "json_schema", "json_schema": {"schema": ..}}
    structured_outputs  an object with one of json, regex, choice, grammar (Lark, as llguidance reads it), json_object
    guided_..           the same, as vLLM called them before: guided_json, guided_regex, ..
    json_schema, regex  SGLang's
    allowed_token_ids   vLLM's: any of these tokens each time

A JSON schema may be an object or the text of one. {} is a schema, that of any JSON. null and false ask for nothing; so does "",
but not in structured_outputs, where it is refused, as an empty list of choices is everywhere: any text would do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http.body import Body, wrong_type
from jdisagg.api.http.unserved import OFF, is_one_of
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.json_values import MAX_DEPTH, is_too_deep
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.lark import token_ranges
from jdisagg.text.schema_comments import uncommented

MAX_CHOICES = 1000
MAX_ALLOWED = 2**18  # token ids; to sort a million holds everybody up
GRAMMAR = "grammar"  # as intake calls the field
ALLOWED_TOKENS = "allowed_token_ids"
RESPONSE_FORMAT = "response_format"  # of answers in text: calls are beside it
_OBJECT = {"type": "object"}
_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
_OF_TYPES = {"type", "const", "enum", "$ref", "anyOf", "oneOf", "allOf"}  # keys that say of which types a value is
_NOTHING = (None, False, "")  # but {} is a schema, and [] no choice
_MOST_ALIKE = 1000  # tokens of an answer that can be but one token again and again, which llguidance reads ahead to its end
_TOO_LONG = f"may have at most {MAX_GRAMMAR_BYTES} bytes beside titles, descriptions, defaults and examples; shorten it"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_UNSERVED_OUTPUTS = {
    "structural_tag": "leave it out, or write a grammar",
    "whitespace_pattern": 'write it into the schema, as "x-guidance": {"whitespace_pattern": ..}',
    "disable_any_whitespace": 'write "x-guidance": {"whitespace_pattern": ""} into the schema',
    "disable_additional_properties": 'write "additionalProperties": false into the objects of the schema',
}
_ADVICE = ("disable_fallback", "backend", "_backend", "_backend_was_auto")  # of vLLM: how, not what


def read_grammar(body: Body) -> Grammar | None:
    """The grammar that the body asks for, whose field it notes in `names`; None = any text will do. Raises InvalidRequest
    naming the field, or two that both ask for one."""
    for name, grammar in _read_all(body).items():
        body.names[GRAMMAR] = name
        return grammar
    return None


def _read_all(body: Body) -> dict[str, Grammar]:
    """At most one, by the name of its field."""
    found: dict[str, Grammar | None] = {RESPONSE_FORMAT: _response_format(body)}
    found |= {f"structured_outputs.{name}": grammar for name, grammar in _structured_outputs(body).items()}
    found |= {f"guided_{name}": read(body, f"guided_{name}") for name, read in _READERS.items()}
    found |= {"json_schema": _schema(body, "json_schema"), "regex": _written(body, "regex", kind=GrammarKind.REGEX)}
    found[ALLOWED_TOKENS] = _tokens(body, ALLOWED_TOKENS)
    asked = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise said_twice(second, first)
    return asked


def said_twice(field: str, first: str) -> InvalidRequest:
    """The error of a field that says what the answer has to be where `first` says it, too."""
    return InvalidRequest.of(field, f"{first} says already what the answer has to be; leave out one of the two")


def _response_format(body: Body) -> Grammar | None:
    """OpenAI's `response_format`."""
    response_format = body.object("response_format")
    match kind := response_format.get("type") if response_format else "text":
        case "text":
            return None
        case "json_object":
            return _schema(Body(response_format, where="response_format."), "schema", of_object=True) or _ANY_OBJECT
        case "json_schema":
            where = "response_format.json_schema"
            if not isinstance(described := response_format.get("json_schema"), dict):
                raise wrong_type(where, "an object with the schema as schema", described)
            if not isinstance(schema := described.get("schema"), dict):
                raise wrong_type(f"{where}.schema", "an object", schema)
            return _schema_grammar(f"{where}.schema", schema)
    raise wrong_type("response_format.type", "text, json_object or json_schema", kind)


def _structured_outputs(body: Body) -> dict[str, Grammar | None]:
    """vLLM's `structured_outputs`, whose unknown fields are refused: what they ask for would not be kept."""
    fields = body.object("structured_outputs")
    if not fields:
        return {}
    where = "structured_outputs"
    for name, instead in _UNSERVED_OUTPUTS.items():
        if not is_one_of(fields.get(name), OFF):
            raise InvalidRequest.of(f"{where}.{name}", f"is not served; {instead}")
    given = {name for name, value in fields.items() if value is not None}
    if unknown := given - _READERS.keys() - {*_UNSERVED_OUTPUTS, *_ADVICE}:
        raise InvalidRequest.of(where, f"is an object with one of {', '.join(_READERS)}; got {min(unknown)[:80]!r}")
    for name in _READERS:
        if fields.get(name) == "":
            raise InvalidRequest.of(f"{where}.{name}", "is empty; leave it out where any text will do")
    inner = Body(fields, where=f"{where}.")
    return {name: read(inner, name) for name, read in _READERS.items()}


def _schema(body: Body, name: str, *, of_object: bool = False) -> Grammar | None:
    """A JSON schema, as an object or as its text. `of_object`: what it says of no type it says of objects."""
    value, name = body.get(name), f"{body.where}{name}"
    if is_one_of(value, _NOTHING):
        return None
    if isinstance(value, str):
        value = _parsed(name, value)
    if not isinstance(value, dict):
        raise wrong_type(name, "a JSON schema: an object, or its text", value)
    said = {key for key, given in value.items() if given is not None or key == "const"}
    return _schema_grammar(name, _OBJECT | value | _OBJECT if of_object and not _OF_TYPES & said else value)


def _parsed(name: str, text: str) -> Any:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _too_long(name)
    try:
        value = json.loads(text)
        if is_too_deep(value):
            raise RecursionError
    except ValueError as error:
        raise InvalidRequest.of(name, f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest.of(name, f"is nested more than {MAX_DEPTH} deep") from error
    return value


def _schema_grammar(name: str, schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(name, *uncommented([schema], MAX_GRAMMAR_BYTES)))


def schema_text(name: str, schema: dict[str, Any], field: str | None = None) -> str:
    """Equal schemas are equal texts. The order of keys stays: it is that of the properties in the answer. Raises InvalidRequest
    for one of more than MAX_GRAMMAR_BYTES, of which it reads no more."""
    parts, num_bytes = list[str](), 0
    try:
        for part in _ENCODER.iterencode(schema):  # one by one: one of megabytes is not written for its beginning
            num_bytes += len(part.encode())
            if num_bytes > MAX_GRAMMAR_BYTES:
                raise InvalidRequest(f"{name}: {_TOO_LONG}", field=field or name)
            parts.append(part)
    except ValueError as error:  # NaN, which is no JSON, or half of a pair, which is no character
        raise InvalidRequest(f"{name}: is not valid JSON: {error}", field=field or name) from error
    return "".join(parts)


def _too_long(name: str) -> InvalidRequest:
    return InvalidRequest.of(name, f"may have at most {MAX_GRAMMAR_BYTES} bytes; shorten it")


def _written(body: Body, name: str, *, kind: GrammarKind) -> Grammar | None:
    if is_one_of(body.get(name), OFF):
        return None
    text = body.text(name)
    return Grammar(kind, text) if text else None


def _choice(body: Body, name: str) -> Grammar | None:
    """One of several texts, exactly."""
    value, name = body.get(name), f"{body.where}{name}"
    if is_one_of(value, _NOTHING):
        return None
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise wrong_type(name, "a list of non-empty strings, one at least", value)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest.of(name, f"may hold at most {MAX_CHOICES} strings; got {len(value)}")
    if sum(map(len, value)) > MAX_GRAMMAR_BYTES:  # written as an expression it is no shorter, and each character takes a step
        raise _too_long(name)
    return Grammar(GrammarKind.REGEX, "|".join(map(_literal, value)))


def _literal(text: str) -> str:
    """A regular expression of it alone."""
    return "".join(char if char.isalnum() or char in " _" else f"\\x{{{ord(char):x}}}" for char in text)


def _tokens(body: Body, name: str) -> Grammar | None:
    """Any of these each time, without an end but by one of them, if the model ends its answers so."""
    if is_one_of(body.get(name), OFF):
        return None
    given = body.integers(name)
    if len(given) > MAX_ALLOWED:
        raise InvalidRequest.of(name, f"may hold at most {MAX_ALLOWED} ids; got {len(given)}")
    token_ids = sorted(set(given))
    if token_ids[0] < 0:
        raise InvalidRequest.of(name, f"token ids must be at least 0; got {token_ids[0]}")
    if len(token_ids) == 1:
        return Grammar(GrammarKind.LARK, f"start: <[{token_ids[0]}]>{{{_MOST_ALIKE}}}")
    text = f"start: <[{token_ranges(token_ids)}]> start"
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest.of(name, f"may hold some 10,000 ids, or ranges without gaps; got {len(token_ids)}")
    return Grammar(GrammarKind.LARK, text)


def _json_object(body: Body, name: str) -> Grammar | None:
    if is_one_of(body.get(name), OFF):
        return None
    return _ANY_OBJECT if body.boolean(name) else None


_READERS: dict[str, Callable[[Body, str], Grammar | None]] = {
    "json": _schema,
    "regex": partial(_written, kind=GrammarKind.REGEX),
    "choice": _choice,
    "grammar": partial(_written, kind=GrammarKind.LARK),
    "json_object": _json_object,
}
