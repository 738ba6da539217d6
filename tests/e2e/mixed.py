"""The mixed load of the end-to-end tests: every kind of request, the same for every way of serving."""

from __future__ import annotations

import random

from tests.e2e.client import Asked

VOCAB = 1024  # token ids used in prompts; inside every demo tokenizer


def mixed_requests(count: int, *, vocab_size: int, max_model_len: int, seed: int = 7) -> list[Asked]:
    """Prompt lengths from 1 to the maximum, greedy and seeded, n > 1, stop ids, max_tokens = 1."""
    rng = random.Random(seed)
    requests: list[Asked] = []
    for number in range(count):
        max_tokens = rng.choice((1, 2, 5, 8, 12, 20))
        longest = max_model_len - max_tokens
        length = rng.choice((1, 2, 7, 15, 16, 17, 31, 33, 48, 64, rng.randint(1, longest)))
        if number % 50 == 3:
            length = longest
        prompt = tuple(rng.randrange(16, vocab_size) for _ in range(length))
        sampling: dict[str, object] = {"max_tokens": max_tokens, "seed": rng.randrange(2**31), "ignore_eos": rng.random() < 0.5}
        kind = number % 6
        if kind == 0:
            sampling["temperature"] = 0.0
        elif kind == 1:
            sampling |= {"temperature": 0.8, "top_p": 0.9}
        elif kind == 2:
            sampling |= {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5}
        elif kind == 3:
            sampling |= {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2}
        elif kind == 4:
            sampling |= {"temperature": 0.0, "logprobs": 3}
        else:
            sampling |= {"temperature": 1.0, "stop_token_ids": [rng.randrange(16, vocab_size) for _ in range(4)]}
        n = 3 if number % 11 == 5 else 1
        requests.append(Asked(prompt=prompt, n=n, sampling=sampling, request_id=f"mixed-{number}"))
    return requests
