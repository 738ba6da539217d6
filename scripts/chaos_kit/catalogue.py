"""What clients ask for: a list of entries, so that the answer to each has to be computed beforehand once only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

LOWEST_TOKEN = 16  # below are special tokens
PLAIN_SHARE = 0.3  # greedy, one choice, nothing else: what another implementation can answer, too


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One question. `sampling` has the names that gRPC and HTTP share."""

    prompt: tuple[int, ...]
    n: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Greedy, with nothing that changes logits."""
        return self.n == 1 and self.sampling["temperature"] == 0.0 and "repetition_penalty" not in self.sampling

    @property
    def max_tokens(self) -> int:
        """Of one choice."""
        return self.sampling["max_tokens"]


def make_catalogue(count: int, *, vocab_size: int, max_model_len: int) -> list[Entry]:
    """Prompts from one token to nearly the most, some with shared beginnings; greedy, sampled, penalties, n of 1 to 4."""
    rng = random.Random(11)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(LOWEST_TOKEN, vocab_size) for _ in range(number))

    heads = [tokens(max_model_len // 3) for _ in range(3)]
    entries: list[Entry] = []
    for number in range(count):
        max_tokens = rng.choice((1, 4, 16, 32, 64))
        length = rng.randint(1, max_model_len // 3)
        if number % 10 == 7:
            length = max_model_len - max_tokens - rng.randrange(8)
        head = rng.choice(heads)[: rng.choice((16, 32, 64))] if number % 3 == 2 else ()
        prompt = (*head, *tokens(length))[: max_model_len - max_tokens]
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "seed": rng.randrange(2**31), "temperature": 0.0}
        n = 1
        if rng.random() >= PLAIN_SHARE:
            n = rng.randint(2, 4) if rng.random() < 0.25 else 1
            sampling |= rng.choice(_KINDS)
            if rng.random() < 0.2:
                sampling["stop_token_ids"] = list(tokens(6))
        sampling["ignore_eos"] = rng.random() < 0.7
        entries.append(Entry(prompt=prompt, n=n, sampling=sampling))
    return entries


_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
)
