"""Engine requests of every kind, for tests that drive engines without an edge."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from jdisagg.core.requests import EngineRequest, Grammar, GrammarKind, SamplingParams
from tests.e2e.mixed import mixed_requests

FAR_S = 1e12
GRAMMARS = (
    Grammar(GrammarKind.REGEX, "[a-z]{2,}( [0-9]{3})*"),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","additionalProperties":{"type":"integer"}}'),
)


def engine_requests(
    count: int, *, vocab_size: int, max_model_len: int, seed: int = 7, shared_prefix: bool = False
) -> list[EngineRequest]:
    """`mixed_requests` as choices, with what those lack: bias, min_tokens, prompt log-probabilities, priorities; nearly all ask
    for log-probabilities, so that equality is one of bits. `shared_prefix`: prompts begin alike, for various lengths."""
    rng = random.Random(seed)
    common = tuple(rng.randrange(1, vocab_size) for _ in range(max_model_len))
    requests: list[EngineRequest] = []
    for number, asked in enumerate(mixed_requests(count, vocab_size=vocab_size, max_model_len=max_model_len, seed=seed)):
        sampling: dict[str, Any] = dict(asked.sampling)
        sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids", ()))  # type: ignore[arg-type]
        if number % 7 != 3:
            sampling.setdefault("logprobs", number % 4)
        if number % 5 == 1:
            bias = {rng.randrange(vocab_size): rng.uniform(-4, 4) for _ in range(3)} | {0: 3.0}
            sampling["logit_bias"] = tuple(bias.items())
        if number % 4 == 2:
            sampling["min_tokens"] = rng.randint(0, sampling["max_tokens"])
        if number % 9 == 4:
            sampling["prompt_logprobs"] = number % 3
        if number % 8 == 2:
            sampling["frequency_penalty"] = 0.6
        if number % 6 == 5:
            sampling |= {"grammar": GRAMMARS[number // 6 % 2], "ignore_eos": False, "min_tokens": 0}
        assert not isinstance(asked.prompt, str)
        num_shared = rng.choice((3, 8, 21, 40)) if shared_prefix else 0
        one = EngineRequest(
            request_id=asked.request_id,
            prompt_token_ids=(*common[: min(num_shared, len(asked.prompt))], *asked.prompt[num_shared:]),
            sampling=SamplingParams(**sampling),
            deadline_s=FAR_S,
            priority=rng.randrange(4),
        )
        requests += choices(one, asked.n) if asked.n > 1 else [one]
    return requests


def long_outputs(count: int, *, vocab_size: int) -> list[EngineRequest]:
    """Short prompts that want many tokens: what a small pool cannot hold all at once."""
    rng = random.Random(3)
    requests = []
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=rng.randint(30, 60),
            seed=rng.randrange(2**32),
            ignore_eos=True,
            logprobs=1,
            repetition_penalty=1.1 if number % 3 == 0 else 1.0,
        )
        prompt = tuple(rng.randrange(1, vocab_size) for _ in range(rng.randint(1, 12)))
        request_id = f"long-{number}"
        requests.append(
            EngineRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling, deadline_s=FAR_S, priority=rng.randrange(4)
            )
        )
    return requests


def choices(request: EngineRequest, n: int, *, together: bool = True) -> list[EngineRequest]:
    """`n` choices of one request. `together`: as the edge sends them, so that they share the prompt's KV."""
    name = request.request_id
    group = name if together else ""
    return [replace(request, request_id=f"{name}/{index}", choice=index, fork_group=group) for index in range(n)]
