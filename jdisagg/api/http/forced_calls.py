"""`tool_choice` that forces a call: the grammar of the answer, and the calls in its text.

    a function's name   the answer is its arguments
    "required"          it is [{"name":"f","parameters":{..}},{"name":"g","parameters":{..}}], one call or more

In what the grammar writes there is no space around `parameters`, so a call is found by what stands before it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from jdisagg.api.http.body import Body, wrong_type
from jdisagg.api.http.grammars import grammar_name, schema_text
from jdisagg.api.http.shapes import call_part, whole_calls
from jdisagg.api.http.tools import read_functions
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.metrics import FORCED
from jdisagg.core.requests import FinishReason, Grammar, GrammarKind, SamplingParams
from jdisagg.text.calls.braces import Braces
from jdisagg.text.schema_annotations import readable

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_HEAD = re.compile(r'[\[,]\{"name":"([^"]*)","parameters":')
_AT_LINE = re.compile(r"grammar \(lark\): at (\d+)\(\d+\): ")  # as errors of a grammar say where they are
_HEAD_LINES, _FUNCTION_LINES = 2, 2  # of the grammar of "required"
_OF_TEXTS = "response_format"  # with a forced call it says nothing, as in vLLM
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """`name`: of the function; None = the model chooses."""

    name: str | None


def read_forced(body: Body) -> ForcedCall | None:
    """None: the model may answer in text. Raises InvalidRequest for a choice of no function that is offered."""
    tools, choice = body.objects("tools"), body.get("tool_choice")
    if choice in (None, "none", "auto"):
        return None
    forced = ForcedCall(None if choice == "required" else _chosen(choice))
    if not tools:
        raise InvalidRequest("tool_choice: a call of no tools can be forced; give some, or leave it out", field="tool_choice")
    if forced.name is not None and forced.name not in _parameters(body):
        offered = ", ".join(map(repr, _parameters(body)))
        raise InvalidRequest(
            f"tool_choice: no function of tools is called {forced.name!r:.80}; tools has {offered:.400}", field="tool_choice"
        )
    return forced


def with_forced(sampling: SamplingParams, body: Body) -> SamplingParams:
    """`sampling` of a chat, whose answer has to be the call that `tool_choice` forces. Raises InvalidRequest where another
    field says what it has to be, but for `response_format`, which is of answers in text, or parameters are no schema of an
    object."""
    forced, in_parallel = read_forced(body), body.boolean("parallel_tool_calls", True)
    if forced is None:
        return sampling
    if sampling.grammar is not None and (name := grammar_name(body)) != _OF_TEXTS:
        told = f"tool_choice: {name} says already what the answer has to be; leave out one of the two"
        raise InvalidRequest(told, field="tool_choice")
    return replace(sampling, grammar=_grammar(body, forced, in_parallel=in_parallel))


def _grammar(body: Body, forced: ForcedCall, *, in_parallel: bool) -> Grammar:
    offered = _parameters(body)
    names = offered if forced.name is None else (forced.name,)  # the others may have parameters that no grammar is made of
    schemas = {name: _schema(f"tools: parameters of {name}", offered[name]) for name in names}
    schema_text("tools: their parameters", schemas, "tools")  # before any is looked into
    if forced.name is not None:
        return Grammar(GrammarKind.JSON_SCHEMA, schema_text("tools", schemas[forced.name]))
    calls = " | ".join(f"call_{number}" for number in range(len(schemas)))
    more = '("," call)* ' if in_parallel else ""
    lines = [f'start: "[" call {more}"]"', f"call: {calls}"]
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name":"{name}","parameters":')
        root = schema_text("tools", _as_root(readable(schema)))
        lines += [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: %json {root}"]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def grammar_field(body: Body) -> str | None:
    """The field of a chat that its grammar is made of."""
    return grammar_name(body) if read_forced(body) is None else "tools"


def with_function(message: str, body: Body) -> str:
    """`message`, of the grammar made of all tools, with the function at fault in the place of a line that nobody has seen."""
    names = list(_parameters(body))

    def named(found: re.Match[str]) -> str:
        number = (int(found[1]) - 1 - _HEAD_LINES) // _FUNCTION_LINES
        return f"parameters of {names[number]}: " if 0 <= number < len(names) else found[0]

    return _AT_LINE.sub(named, message, count=1)


def _chosen(choice: Any) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise wrong_type("tool_choice", 'none, auto, required or {"type": "function", "function": {"name": ..}}', choice)


def _parameters(body: Body) -> dict[str, Any]:
    """Those of each function, by its name."""
    parameters: dict[str, Any] = {}
    for index, function in enumerate(read_functions(body)):
        name, where = function.name, f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise wrong_type(where, "1 to 64 letters, digits, _ and -, for a call that is forced", name)
        if name in parameters:
            raise InvalidRequest(f"{where}: another function is called {name}, too; rename one", field=where)
        parameters[name] = function.parameters
    return parameters


def _schema(where: str, parameters: Any) -> dict[str, Any]:
    """An object whatever it says, so that a reader finds its end by its braces."""
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}: must be a JSON schema, an object", field="tools")
    schema = {**_ANY_ARGUMENTS, **parameters} if parameters else _NO_ARGUMENTS  # else the model would make some up
    if schema["type"] != "object":
        raise InvalidRequest(f"{where}: must be the schema of an object, whose type is object", field="tools")
    return schema


def _as_root(schema: dict[str, Any]) -> dict[str, Any]:
    """As each is in a grammar of several, where those defaults do not count that `read_schema` gives to others."""
    own = schema.get("x-guidance", {})
    return schema | {"x-guidance": {"coerce_one_of": True} | own} if isinstance(own, dict) else schema


class ForcedReader:
    """Text of one choice in, parts of its calls out, in OpenAI's form of deltas. A MessageReader."""

    outcome = FORCED

    def __init__(self, forced: ForcedCall) -> None:
        self.nothing: str | None = None
        self._name = forced.name
        self._index = -1  # of the latest call
        self._before = ""  # what came since its arguments ended
        self._braces = Braces()  # of its arguments

    def message(self, text: str) -> dict[str, Any]:
        """See MessageReader."""
        return {"content": None, "tool_calls": whole_calls(self.push(text))}

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """See MessageReader."""
        return {"tool_calls": parts} if (parts := self.push(text)) else {}

    def push(self, text: str) -> list[dict[str, Any]]:
        """The parts that `text` adds; those that begin a call have an id and a name, all have arguments."""
        if self._name is not None:
            return self._named(self._name, text)
        parts: list[dict[str, Any]] = []
        while text:
            if self._braces.depth == 0:
                self._before += text
                head = _HEAD.search(self._before)
                if head is None or head.end() == len(self._before):
                    return parts  # a head is told together with its first brace
                text, self._before = self._before[head.end() :], ""
                end = self._braces.end(text)
                parts.append(self._begin(head[1], text[:end]))
            else:
                end = self._braces.end(text)
                parts.append(call_part(self._index, text[:end]))
            text = text[end:]
        return parts

    def finish_reason(self, finish: FinishReason) -> str:
        """Of the answer whose text has been pushed. As OpenAI has it: a call that was asked for by its name is an ordinary
        end, and so is what a stop string leaves without a whole call."""
        has_calls = self._name is None and self._index >= 0 and self._braces.depth == 0
        return "tool_calls" if finish is FinishReason.STOP and has_calls else finish.value

    def _named(self, name: str, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        return [call_part(0, text) if self._index == 0 else self._begin(name, text)]

    def _begin(self, name: str, arguments: str) -> dict[str, Any]:
        self._index += 1
        return call_part(self._index, arguments, name)
