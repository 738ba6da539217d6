"""What clients ask for: a list of entries, so that the answer to each has to be computed beforehand once only."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.requests import GrammarKind
from jdisagg.v1 import common_pb2

LOWEST_TOKEN, VOCAB = 16, 1024  # below are special tokens; as every model that is asked has at least
MAX_MODEL_LEN = 256
LONG_MODEL_LEN = 640  # for `long_questions`
PLAIN_SHARE = 0.3  # greedy, one choice, nothing else: what another implementation can answer, too
GRAMMAR_SHARE = 0.2  # of the others


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One question. `sampling` has the names that gRPC and HTTP share; `grammar` is its kind and text."""

    prompt: tuple[int, ...]
    n: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    grammar: tuple[GrammarKind, str] | None = None
    stop: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Greedy, with nothing that changes logits."""
        asks = self.sampling["temperature"] == 0.0, "repetition_penalty" not in self.sampling, self.grammar is None
        return self.n == 1 and all(asks)

    @property
    def over_grpc(self) -> common_pb2.SamplingParams:
        """All of it, for `GenerateRequest.sampling`."""
        grammar = None
        if self.grammar is not None:
            grammar = common_pb2.Grammar(kind=_KIND_NUMBERS[self.grammar[0]], text=self.grammar[1])
        return common_pb2.SamplingParams(**self.sampling, grammar=grammar)

    @property
    def over_http(self) -> dict[str, Any]:
        """The same, as fields of a body."""
        if self.grammar is None:
            return self.sampling
        kind, text = self.grammar
        return {**self.sampling, "structured_outputs": {_KIND_FIELDS[kind]: text}}

    @property
    def max_tokens(self) -> int:
        """Of one choice."""
        return self.sampling["max_tokens"]


def make_catalogue(count: int) -> list[Entry]:
    """Prompts from one token to nearly the most, some with shared beginnings; greedy, sampled, penalties, stop strings, log
    probabilities, n of 1 to 4."""
    rng, rng_of_stops = random.Random(11), random.Random(12)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(LOWEST_TOKEN, VOCAB) for _ in range(number))

    heads = [tokens(MAX_MODEL_LEN // 3) for _ in range(3)]
    entries: list[Entry] = []
    for number in range(count):
        max_tokens = rng.choice((1, 4, 16, 32, 64))
        length = rng.randint(1, MAX_MODEL_LEN // 3)
        if number % 10 == 7:
            length = MAX_MODEL_LEN - max_tokens - rng.randrange(8)
        head = rng.choice(heads)[: rng.choice((16, 32, 64))] if number % 3 == 2 else ()
        prompt = (*head, *tokens(length))[: MAX_MODEL_LEN - max_tokens]
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "seed": rng.randrange(2**31), "temperature": 0.0}
        n = 1
        is_plain = rng.random() < PLAIN_SHARE
        if not is_plain:
            n = rng.randint(2, 4) if rng.random() < 0.25 else 1
            sampling |= rng.choice(_KINDS)
            if rng.random() < 0.2:
                sampling["stop_token_ids"] = list(tokens(6))
        sampling["ignore_eos"] = rng.random() < 0.7
        grammar = None
        if not is_plain and rng.random() < GRAMMAR_SHARE:
            grammar, sampling["ignore_eos"] = rng.choice(_GRAMMARS), False
        stop = rng_of_stops.choice(_STOPS) if not is_plain and grammar is None else ()
        entries.append(Entry(prompt=prompt, n=n, sampling=sampling, grammar=grammar, stop=stop))
    return entries


def long_questions(count: int) -> tuple[Entry, ...]:
    """Long answers to short and long prompts; greedy, sampled, penalties, log probabilities, one and two choices."""
    rng = random.Random(43)
    return tuple(
        Entry(
            prompt=tuple(rng.randrange(LOWEST_TOKEN, VOCAB) for _ in range(_LENGTHS[number % len(_LENGTHS)])),
            n=_CHOICES[number % len(_CHOICES)],
            sampling={
                "max_tokens": rng.choice((60, 110, 200)),
                "seed": rng.randrange(2**31),
                "ignore_eos": True,
                **_LONG_KINDS[number % len(_LONG_KINDS)],
            },
        )
        for number in range(count)
    )


_SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "kind": {"enum": ["a", "b"]}, "ok": {"type": "boolean"}},
    "required": ["id", "kind", "ok"],
}
_GRAMMARS = (
    (GrammarKind.REGEX, "[a-z]{3}(-[0-9]{4}){1,6}"),
    (GrammarKind.REGEX, "(yes|no|perhaps)( [a-zé]+)*"),
    (GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA)),
)
_KIND_NUMBERS = {
    GrammarKind.REGEX: common_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.JSON_SCHEMA: common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
}
_KIND_FIELDS = {GrammarKind.REGEX: "regex", GrammarKind.JSON_SCHEMA: "json"}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
)
_STOPS = ((), (), ("self", "\n\n"), ("return ",))
_LONG_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 0},  # greedy streams repeat themselves: a token more or less shows in what it was worth
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 50, "logprobs": 0},
)
_CHOICES = (1, 1, 2, 1, 1)  # its length has nothing in common with that of _LONG_KINDS: every kind meets every number
_LENGTHS = (5, 100, 250, 390)
