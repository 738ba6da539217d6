"""What sampling parameters may be, each bound checked once, for HTTP and gRPC alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Grammar, SamplingParams

MAX_LOGIT_BIAS = 300
MAX_GRAMMAR_BYTES = 2**16  # every choice carries them from process to process, and each compiles them
NUMBERS: dict[str, tuple[float, float]] = {  # sampling parameters that are any number in [low, high], but for top_p: (0, 1]
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),  # less makes logits infinite
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_COUNTS = {
    "min_tokens": (0, 2**31 - 1),
    "top_k": (1, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def check_sampling(sampling: SamplingParams, card: ModelCard) -> None:
    """Raise InvalidRequest when a parameter is out of range."""
    check_ranges(sampling)
    check_logit_bias(len(sampling.logit_bias))
    for token_id, bias in sampling.logit_bias:
        check_range(f"logit_bias[{token_id}]", bias, -100, 100, field="logit_bias")
    max_stop_ids = MAX_STOP_TOKEN_IDS - len(card.eos_token_ids)
    if len(sampling.stop_token_ids) > max_stop_ids:
        raise invalid("stop_token_ids", f"may hold at most {max_stop_ids} ids", len(sampling.stop_token_ids))
    check_token_ids((token_id for token_id, _ in sampling.logit_bias), card.vocab_size, "logit_bias")
    check_token_ids(sampling.stop_token_ids, card.vocab_size, "stop_token_ids")
    if sampling.grammar is not None:
        _check_grammar(sampling.grammar, sampling)


def _check_grammar(grammar: Grammar, sampling: SamplingParams) -> None:
    num_bytes = len(grammar.text.encode())
    if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
        raise invalid("grammar", f"its text must have 1 to {MAX_GRAMMAR_BYTES} bytes", num_bytes)
    if sampling.ignore_eos:
        raise invalid("ignore_eos", "a constrained answer ends where its grammar ends; leave out one of the two", "true")
    if sampling.min_tokens > 0:
        wanted = "a constrained answer ends where its grammar ends; leave it out, or let the grammar ask for more"
        raise invalid("min_tokens", wanted, sampling.min_tokens)


def check_logit_bias(num_tokens: int) -> None:
    """Raise InvalidRequest when it is for too many."""
    if num_tokens > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"may hold at most {MAX_LOGIT_BIAS} tokens", num_tokens)


def check_ranges(sampling: SamplingParams) -> None:
    """Raise InvalidRequest when a number is out of range, whatever the model."""
    for name, (low, high) in (NUMBERS | _COUNTS).items():
        if (value := getattr(sampling, name)) is not None:
            check_range(name, value, low, high, open_below=name == "top_p")


def check_token_ids(token_ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raise InvalidRequest when an id is outside [0, vocab_size)."""
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise invalid(field, f"token ids must be in [0, {vocab_size}), the model's vocabulary", wrong)


def check_range(
    name: str, value: float, low: float, high: float, *, open_below: bool = False, field: str | None = None
) -> None:
    """Raise InvalidRequest when `value` is not in [low, high]; a NaN is in no range."""
    if not (low < value <= high if open_below else low <= value <= high) or not math.isfinite(value):
        raise invalid(field or name, f"{name} must be in {'(' if open_below else '['}{low}, {high}]", value)


def invalid(field: str, wanted: str, got: object) -> InvalidRequest:
    """The error of a field that is not as it must be."""
    text = wanted if wanted.startswith(field) else f"{field}: {wanted}"
    return InvalidRequest(f"{text}; got {got}", field=field)
