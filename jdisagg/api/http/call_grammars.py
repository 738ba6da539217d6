"""Answers that are calls, or may be: their grammars.

tool_choice, a function's name      the answer is its arguments
"required"                          it is [{"name":"f","parameters":{..}},{"name":"g","parameters":{..}}], one call or more
"auto", and a response_format       the answer that this asks for, or calls in the model's format
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http.body import Body
from jdisagg.api.http.grammars import GRAMMAR, RESPONSE_FORMAT, said_twice, schema_text
from jdisagg.api.http.tools import ForcedCall, may_call, read_forced, read_functions, read_parameters
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind, SamplingParams
from jdisagg.text.calls.grammar import answer_or_calls
from jdisagg.text.grammar import schema_in_lark
from jdisagg.text.schema_comments import uncommented
from jdisagg.text.schema_tags import looks

TOOLS = "tools"  # the field that the grammar is made of
_AT_LINE = re.compile(r"grammar \(lark\): at (\d+)\(\d+\): ")  # as errors of a grammar say where they are
_HEAD_LINES, _FUNCTION_LINES = 2, 2  # of the grammar of "required"
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def with_forced(sampling: SamplingParams, body: Body) -> SamplingParams:
    """`sampling` that was read of a chat, whose answer has to be the call that `tool_choice` forces. Raises InvalidRequest
    where another field says what it has to be, but for `response_format`, which is of answers in text, or parameters are no
    schema of an object."""
    forced, in_parallel = read_forced(body), body.boolean("parallel_tool_calls", True)
    if forced is None:
        return sampling
    if (name := body.names.get(GRAMMAR, RESPONSE_FORMAT)) != RESPONSE_FORMAT:  # that says nothing here, as in vLLM
        raise said_twice("tool_choice", name)
    body.names[GRAMMAR] = TOOLS
    return replace(sampling, grammar=_grammar(body, forced, in_parallel=in_parallel))


def with_free_calls(sampling: SamplingParams, body: Body, edge: Edge) -> SamplingParams:
    """`sampling` that was read of a chat, whose answer may be calls, too, where `response_format` alone says what it has to be
    and the format of calls is known. Raises InvalidRequest where both together are too long."""
    answer, call_format = sampling.grammar, edge.call_format
    if answer is None or call_format is None or body.names.get(GRAMMAR) != RESPONSE_FORMAT or not may_call(body):
        return sampling
    names = list(dict.fromkeys(function.name for function in read_functions(body)))
    schema_text("tools: their names", {"enum": names}, "tools")
    schema = schema_text(RESPONSE_FORMAT, schema_in_lark(json.loads(answer.text)))
    in_parallel = body.boolean("parallel_tool_calls", True)
    text = answer_or_calls(schema, call_format, names, edge.tokenizer.token_id, in_parallel=in_parallel)
    if (num_bytes := len(text.encode())) > MAX_GRAMMAR_BYTES:
        told = f"with the names of tools it may have at most {MAX_GRAMMAR_BYTES} bytes; got {num_bytes}; shorten it"
        raise InvalidRequest.of(RESPONSE_FORMAT, told)
    return replace(sampling, grammar=Grammar(GrammarKind.LARK, text))


def call_head(name: str) -> str:
    """What stands before the arguments of a call."""
    return f'{{"name":"{name}","parameters":'


def without_line(message: str, body: Body) -> str:
    """`message` without a line that nobody has seen, of a grammar that was written here; in its place the function at fault,
    where that is made of them."""
    field = body.names.get(GRAMMAR)
    if field not in (TOOLS, RESPONSE_FORMAT):
        return message
    names = list(read_parameters(body)) if field == TOOLS else []

    def named(found: re.Match[str]) -> str:
        number = (int(found[1]) - 1 - _HEAD_LINES) // _FUNCTION_LINES
        return f"parameters of {names[number]}: " if 0 <= number < len(names) else ""

    return _AT_LINE.sub(named, message, count=1)


def _grammar(body: Body, forced: ForcedCall, *, in_parallel: bool) -> Grammar:
    offered = read_parameters(body)
    names = offered if forced.name is None else (forced.name,)  # the others may have parameters that no grammar is made of
    given = [_schema(f"tools: parameters of {name}", offered[name]) for name in names]
    schemas = dict(zip(names, uncommented(given, MAX_GRAMMAR_BYTES), strict=True))
    schema_text("tools: their parameters", schemas, "tools")  # before any is looked into
    if forced.name is not None:
        return Grammar(GrammarKind.JSON_SCHEMA, schema_text("tools", schemas[forced.name]))
    calls = " | ".join(f"c{number}" for number in range(len(schemas)))  # short: a client may offer 128 functions
    more = '("," call)* ' if in_parallel else ""
    lines = [f'start: "[" call {more}"]"', f"call: {calls}"]
    left = looks()  # for all of them: each alone may take 20 ms
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(call_head(name))
        root = schema_text("tools", schema_in_lark(schema, left))
        lines += [f'c{number}: {head} a{number} "}}"', f"a{number}: %json {root}"]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def _schema(where: str, parameters: Any) -> dict[str, Any]:
    """An object whatever it says, so that a reader finds its end by its braces."""
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}: must be a JSON schema, an object", field="tools")
    schema = parameters or _NO_ARGUMENTS  # else the model would make some up
    if schema.get("type") is None:
        return _ANY_ARGUMENTS | schema | _ANY_ARGUMENTS
    if schema["type"] != "object":
        raise InvalidRequest(f"{where}: must be the schema of an object, whose type is object", field="tools")
    return schema
