"""GET /openapi.json: the served paths and fields, for tools that generate clients. Fields that are always refused are not in it
(`unserved`); tests compare the rest with what the endpoints read, and the bounds with what they refuse. Bounds that depend on
the model (its context, vocabulary and EOS ids) are not in it. Of a field that need not be there null says the same as its
absence."""

from __future__ import annotations

from typing import Any

from jdisagg.api.generation.intake import MAX_CACHE_SALT, MAX_N, MAX_SEQUENCES, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, NUMBERS
from jdisagg.api.http.grammars import MAX_ALLOWED, MAX_CHOICES
from jdisagg.api.http.parameters import SIDES
from jdisagg.api.http.request_id import MAX_NAME
from jdisagg.api.http.template_variables import EFFORTS, KINDS
from jdisagg.api.http.thoughts import SHOWN
from jdisagg.api.http.tokens import MAX_CHARACTERS, MAX_TOKENS
from jdisagg.core.requests import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from jdisagg.text.bad_words import MAX_BAD_LENGTH, MAX_BAD_WORDS

_INTEGER, _STRING, _BOOLEAN = ({"type": kind} for kind in ("integer", "string", "boolean"))
_INT32_MAX = 2**31 - 1
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_BAD_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_LENGTH}
_REQUEST_ID = {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "pattern": "^[!-~]*$"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_NO_CONTENT = {"properties": {"role": {"enum": ["assistant", "tool"]}}}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1}, "content": {"description": "a text, or a list of text parts"}},
    "required": ["role"],
    "anyOf": [{"required": ["content"]}, _NO_CONTENT, {"required": ["tool_calls"]}],
}
_GRAMMAR = {"type": "string", "maxLength": MAX_GRAMMAR_BYTES}
_JSON_SCHEMA = {"oneOf": [{"type": "object"}, _GRAMMAR]}
_CHOICES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES}
_PROMPT_IDS = _TOKEN_IDS | {"minItems": 1}
_PROMPTS = {"type": "array", "items": {"oneOf": [_STRING, _PROMPT_IDS]}, "minItems": 1, "maxItems": MAX_SEQUENCES}


_NAME = {"name": "name", "in": "path", "required": True, "schema": _STRING}


def _range(kind: str, low: float, high: float) -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": high}


_OUTPUTS: dict[str, Any] = {
    "json": _JSON_SCHEMA,
    "regex": _GRAMMAR,
    "choice": _CHOICES,
    "grammar": _GRAMMAR | {"description": "Lark, as llguidance reads it"},
    "json_object": _BOOLEAN,
}
_SHARED: dict[str, Any] = {
    "model": _STRING,
    "stream": _BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN}},
    "request_id": _REQUEST_ID,
    "rid": _REQUEST_ID,
    "n": _range("integer", 1, MAX_N),
    "seed": _INTEGER | {"description": "-1 is none"},
    "stop": {"oneOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]},
    "include_stop_str_in_output": _BOOLEAN,
    "truncate_prompt_tokens": {
        "oneOf": [{"enum": [-1]}, _range("integer", 1, _INT32_MAX)],
        "description": "-1 is as many as fit beside max_tokens",
    },
    "truncation_side": {"enum": list(SIDES), "description": "where tokens are left out"},
    "max_tokens": _range("integer", 1, _INT32_MAX),
    **{name: _range("number", *bounds) for name, bounds in NUMBERS.items()},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _range("integer", -1, _INT32_MAX) | {"description": "-1 and 0 are off"},
    "logit_bias": {
        "type": "object",
        "additionalProperties": _range("number", -100, 100),
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "min_tokens": _range("integer", 0, _INT32_MAX),
    "ignore_eos": _BOOLEAN,
    "stop_token_ids": _TOKEN_IDS | {"maxItems": MAX_STOP_TOKEN_IDS, "description": "the model's EOS ids take places of these"},
    "return_token_ids": _BOOLEAN,
    "return_tokens_as_token_ids": _BOOLEAN | {"description": "in logprobs"},
    "skip_special_tokens": _BOOLEAN,
    "add_special_tokens": _BOOLEAN,
    "priority": _range("integer", -_INT32_MAX - 1, _INT32_MAX),
    "cache_salt": _STRING | {"maxLength": MAX_CACHE_SALT},
    "timeout_s": {"type": "number", "exclusiveMinimum": 0},
    "response_format": {
        "type": "object",
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "schema": _JSON_SCHEMA | {"description": "of a json_object"},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
        },
        "required": ["type"],
    },
    "structured_outputs": {"type": "object", "properties": _OUTPUTS, "description": "at most one of them"},
    **{f"guided_{name}": schema for name, schema in _OUTPUTS.items()},
    "json_schema": _JSON_SCHEMA,
    "regex": _GRAMMAR,
    "allowed_token_ids": _TOKEN_IDS | {"maxItems": MAX_ALLOWED},
    "bad_words": {
        "oneOf": [_BAD_WORD, {"type": "array", "items": _BAD_WORD, "maxItems": MAX_BAD_WORDS}],
        "description": f"texts that are no part of the answer's; as a JSON list of at most {MAX_GRAMMAR_BYTES} bytes",
    },
}
_NAMED = {"type": "object", "properties": {"name": _STRING | {"minLength": 1}}, "required": ["name"]}
_TOOL = {"type": "object", "properties": {"function": _NAMED}, "required": ["function"]}
_NAMED_FUNCTION = {
    "type": "object",
    "properties": {"type": {"enum": ["function"]}, "function": _NAMED},
    "required": ["type", "function"],
}
_COMPLETION = _SHARED | {
    "prompt": {"oneOf": [_STRING, _PROMPT_IDS, _PROMPTS]},
    "max_tokens": _range("integer", 0, _INT32_MAX) | {"description": "0 with echo only"},
    "max_completion_tokens": _range("integer", 0, _INT32_MAX) | {"description": "max_tokens by another name"},
    "echo": _BOOLEAN,
    "logprobs": _range("integer", 0, MAX_LOGPROBS),
    "prompt_logprobs": _range("integer", 0, MAX_LOGPROBS),
    "best_of": {"type": "integer", "description": "must equal n"},
}
_VARIABLES: dict[str, Any] = {  # of templates, and advice beside them
    "chat_template_kwargs": {"type": "object"},
    "chat_template_args": {"type": "object", "description": "chat_template_kwargs by another name"},
    "reasoning_effort": {"enum": list(EFFORTS)},
    "reasoning": {
        "type": "object",
        "properties": {"effort": {"enum": list(EFFORTS)}, "enabled": _BOOLEAN, "exclude": _BOOLEAN},
    },
    "enable_thinking": _BOOLEAN,
    "thinking": {"type": "object", "properties": {"type": {"enum": list(KINDS)}}},
    "think": _BOOLEAN,
    "thinking_budget": {"type": "number", "description": "ignored"},
}
_THOUGHTS: dict[str, Any] = {
    "include_reasoning": _BOOLEAN | {"description": "false: without what the model thinks"},
    "separate_reasoning": _BOOLEAN | {"description": "false: what the model thinks is part of content"},
    "reasoning_format": {"enum": list(SHOWN)},
}
_CHAT = _SHARED | {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "max_completion_tokens": _range("integer", 1, _INT32_MAX),
    "logprobs": _BOOLEAN,
    "top_logprobs": _range("integer", 0, MAX_LOGPROBS),
    "prompt_logprobs": _range("integer", 0, MAX_LOGPROBS) | {"description": "not with stream"},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"oneOf": [{"enum": ["none", "auto", "required"]}, _NAMED_FUNCTION]},
    "parallel_tool_calls": _BOOLEAN | {"description": "false: at most one call"},
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
    **_THOUGHTS,
    **_VARIABLES,
}
_OF_TEMPLATES = ("messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message", *_VARIABLES)
_TOKENIZE = {
    "model": _STRING,
    "prompt": _STRING | {"maxLength": MAX_CHARACTERS},
    "add_special_tokens": _BOOLEAN,
    "return_token_strs": _BOOLEAN,
    **{name: _CHAT[name] for name in _OF_TEMPLATES},
    **_THOUGHTS,
}
_DETOKENIZE = {"model": _STRING, "tokens": _TOKEN_IDS | {"maxItems": MAX_TOKENS}}


def openapi_document(title: str) -> dict[str, Any]:
    """OpenAPI 3.1 description of what this process serves."""
    paths = {
        "/v1/completions": _post("Complete a prompt", _COMPLETION, ["prompt"]),
        "/v1/chat/completions": _post("Answer a conversation", _CHAT, ["messages"]),
        "/tokenize": _post("Text or messages to token ids", _TOKENIZE, [], one_of=("prompt", "messages")),
        "/detokenize": _post("Token ids to text", _DETOKENIZE, ["tokens"]),
        "/v1/models": _get("The served model"),
        "/v1/models/{name}": _get("The same, asked for by name") | {"parameters": [_NAME]},
        "/health": _get("The engine turns over"),
        "/ping": _get("As /health") | {"post": _get("As /health")["get"]},
        "/version": _get("The version of the package"),
        "/ready": _get("A request would be served now"),
        "/metrics": _get("Prometheus metrics", "text/plain"),
        "/debug/state": _get("Queues, ledgers and streams; loopback only"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"jdisagg: {title}", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _post(summary: str, properties: dict[str, Any], required: list[str], one_of: tuple[str, ...] = ()) -> dict[str, Any]:
    """`one_of`: fields of which the body must have one."""
    needed = (*required, *one_of)
    shown = {name: schema if name in needed else _or_null(schema) for name, schema in properties.items()}
    schema: dict[str, Any] = {"type": "object", "properties": shown, "required": required}
    if one_of:
        schema["anyOf"] = [{"required": [name]} for name in one_of]
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": body,
            "responses": _responses("application/json"),
            "security": [{"key": []}, {}],
        }
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """null means absent. What is not one type is one of several already, or listed by its values."""
    if "type" in schema:
        return schema | {"type": [schema["type"], "null"]}
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {"oneOf": [*schema["oneOf"], {"type": "null"}]}


def _get(summary: str, media_type: str = "application/json") -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(media_type)}}


def _responses(media_type: str) -> dict[str, Any]:
    return {
        "200": {"description": "The answer", "content": {media_type: {}}},
        "default": {"description": "An OpenAI error object", "content": {"application/json": {}}},
    }
