"""Pieces of OpenAI responses that several endpoints share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from jdisagg.api.generation.choice import ScoredToken, Transcript, Usage
from jdisagg.core.fleet import ModelCard
from jdisagg.text.tokenizer import Tokenizer


def envelope(
    kind: str, choices: list[dict[str, Any]], fingerprint: str | None, *, request_id: str, created: int, card: ModelCard
) -> dict[str, Any]:
    """A response or chunk. `fingerprint`: of who answers; None = it is not known yet."""
    return {
        "id": request_id,
        "object": kind,
        "created": created,
        "model": card.name,
        "system_fingerprint": fingerprint or card.fingerprint,
        "choices": choices,
    }


def provenance_object(transcript: Transcript) -> dict[str, Any]:
    """Where the KV came from: the first choice's fields, and one entry per choice."""
    shown = [
        {"index": choice.index, **asdict(choice.provenance)} for choice in transcript.choices if choice.provenance is not None
    ]
    first = {key: value for key, value in shown[0].items() if key != "index"} if shown else {}
    return {**first, "choices": shown}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    thought = usage.reasoning_tokens
    details = {} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}
    return details | {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """`logprobs` of /v1/completions: four parallel lists. Alternatives that spell the same text keep the likelier one.
    `as_ids`: tokens are named by their ids."""
    name = _id_name if as_ids else tokenizer.token_text
    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_alternatives(name, token, num_top) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions; `as_ids` as in `completion_logprobs`."""
    entry = partial(_entry, tokenizer, as_ids)
    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*alternative) for alternative in token.top[:num_top]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int) -> list[dict[str, Any] | None]:
    """Per prompt token: token id to logprob, rank and text (vLLM's form); None for the first."""
    return [None if token.logprob is None else _ranked(tokenizer, token, num_top) for token in tokens]


def _id_name(token_id: int) -> str:
    """As vLLM has it."""
    return f"token_id:{token_id}"


def _alternatives(name: Callable[[int], str], token: ScoredToken, num_top: int) -> dict[str, float] | None:
    """The chosen token is always among them, as OpenAI has it."""
    if token.logprob is None:
        return None
    shown: dict[str, float] = {}
    for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
        shown.setdefault(name(token_id), logprob)
    return shown


def _entry(tokenizer: Tokenizer, as_ids: bool, token_id: int, logprob: float | None) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    name = _id_name(token_id) if as_ids else spelled.decode("utf-8", "replace")
    return {"token": name, "logprob": logprob, "bytes": list(spelled)}


def _ranked(tokenizer: Tokenizer, token: ScoredToken, num_top: int) -> dict[str, Any]:
    ranked = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for rank, (token_id, logprob) in enumerate(token.top[:num_top], start=1)
    }
    chosen = {"logprob": token.logprob, "rank": None, "decoded_token": tokenizer.token_text(token.token_id)}
    return {str(token.token_id): chosen} | ranked
