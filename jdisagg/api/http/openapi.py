"""GET /openapi.json: the served paths and fields, for tools that generate clients. Fields that are always refused are not in it
(`unserved`); a test compares the rest with what the endpoints read."""

from __future__ import annotations

from typing import Any

_NUMBER, _INTEGER, _STRING, _BOOLEAN = ({"type": kind} for kind in ("number", "integer", "string", "boolean"))
_STRINGS = {"oneOf": [_STRING, {"type": "array", "items": _STRING}]}
_TOKEN_IDS = {"type": "array", "items": _INTEGER}
_PROMPT = {"oneOf": [_STRING, _TOKEN_IDS, {"type": "array", "items": {"oneOf": [_STRING, _TOKEN_IDS]}}]}

_SHARED: dict[str, Any] = {
    "model": _STRING,
    "stream": _BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": _BOOLEAN}},
    "n": {"type": "integer", "minimum": 1, "maximum": 64},
    "seed": _INTEGER,
    "stop": _STRINGS,
    "max_tokens": _INTEGER,
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _INTEGER,
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
    "min_tokens": _INTEGER,
    "ignore_eos": _BOOLEAN,
    "stop_token_ids": _TOKEN_IDS,
    "return_token_ids": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "add_special_tokens": _BOOLEAN,
    "priority": _INTEGER,
    "cache_salt": _STRING,
    "response_format": {"type": "object", "properties": {"type": {"enum": ["text"]}}},
}
_COMPLETION = _SHARED | {
    "prompt": _PROMPT,
    "echo": _BOOLEAN,
    "logprobs": _INTEGER,
    "prompt_logprobs": _INTEGER,
    "best_of": {"type": "integer", "description": "must equal n"},
}
_CHAT = _SHARED | {
    "messages": {"type": "array", "items": {"type": "object", "required": ["role"]}, "minItems": 1},
    "max_completion_tokens": _INTEGER,
    "logprobs": _BOOLEAN,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "tools": {"type": "array", "items": {"type": "object"}},
    "tool_choice": {"enum": ["none", "auto"]},
    "add_generation_prompt": _BOOLEAN,
    "chat_template_kwargs": {"type": "object"},
}
_OF_TEMPLATES = ("messages", "tools", "tool_choice", "add_generation_prompt", "chat_template_kwargs")
_TOKENIZE = {
    "model": _STRING,
    "prompt": _STRING,
    "add_special_tokens": _BOOLEAN,
    "return_token_strs": _BOOLEAN,
    **{name: _CHAT[name] for name in _OF_TEMPLATES},
}
_DETOKENIZE = {"model": _STRING, "tokens": _TOKEN_IDS}


def openapi_document(title: str) -> dict[str, Any]:
    """OpenAPI 3.1 description of what this process serves."""
    paths = {
        "/v1/completions": _post("Complete a prompt", _COMPLETION, ["prompt"]),
        "/v1/chat/completions": _post("Answer a conversation", _CHAT, ["messages"]),
        "/tokenize": _post("Text or messages to token ids", _TOKENIZE, []),
        "/detokenize": _post("Token ids to text", _DETOKENIZE, ["tokens"]),
        "/v1/models": _get("The served model"),
        "/health": _get("The engine turns over"),
        "/ping": _get("As /health"),
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


def _post(summary: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": body,
            "responses": _responses("application/json"),
            "security": [{"key": []}, {}],
        }
    }


def _get(summary: str, media_type: str = "application/json") -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(media_type)}}


def _responses(media_type: str) -> dict[str, Any]:
    return {
        "200": {"description": "The answer", "content": {media_type: {}}},
        "default": {"description": "An OpenAI error object", "content": {"application/json": {}}},
    }
