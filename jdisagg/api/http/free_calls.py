"""`response_format` beside `tools` that a model may call: the grammar has the answer and calls in the model's format."""

from __future__ import annotations

import json
from dataclasses import replace

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http.body import Body
from jdisagg.api.http.forced_calls import AT_LINE
from jdisagg.api.http.grammars import GRAMMAR, RESPONSE_FORMAT, schema_text
from jdisagg.api.http.tools import may_call, read_functions
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind, SamplingParams
from jdisagg.text.calls.grammar import answer_or_calls
from jdisagg.text.grammar import schema_in_lark


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
        raise InvalidRequest(f"{RESPONSE_FORMAT}: {told}", field=RESPONSE_FORMAT)
    return replace(sampling, grammar=Grammar(GrammarKind.LARK, text))


def without_line(message: str) -> str:
    """`message`, of the grammar made of both, without a line that nobody has seen."""
    return AT_LINE.sub("", message, count=1)
