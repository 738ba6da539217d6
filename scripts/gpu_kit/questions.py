"""The streams that every engine has to answer alike, and the answers of the first one that did."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench_kit.client import Client, TimedStream
from bench_kit.model import Prompts

from gpu_kit.findings import Findings
from gpu_kit.setting import Scale, Setting

SEED_STREAMS, SEED_KILLED, SEED_FIRST = 11, 12, 13
TEMPERATURE = 0.9
LEAST_VARIED = 4  # distinct tokens, on average, of a stream


@dataclass(frozen=True, kw_only=True)
class Question:
    """One stream; every other one is sampled."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


def questions(scale: Scale) -> list[Question]:
    """Short ones, of many lengths."""
    return _draw(scale.num_streams, scale.prompt_tokens, scale.stream_tokens, SEED_STREAMS)


def killed_questions(scale: Scale) -> list[Question]:
    """Longer prompts and answers: what is under way when P dies."""
    longest = scale.prompt_tokens[1]
    return _draw(scale.num_killed, (longest, 2 * longest), 2 * scale.stream_tokens, SEED_KILLED)


def _draw(count: int, lengths: tuple[int, int], max_tokens: int, seed: int) -> list[Question]:
    rng, prompts = random.Random(seed), Prompts(seed)
    return [
        Question(
            prompt=tuple(prompts.next(rng.randint(*lengths))),
            max_tokens=max_tokens,
            temperature=TEMPERATURE if number % 2 else 0.0,
            seed=rng.randrange(2**31),
        )
        for number in range(count)
    ]


def ask(
    client: Client,
    asked: Sequence[Question],
    at_once: int,
    on_first_token: Callable[[], object] = lambda: None,
    *,
    cache_salt: str = "",
) -> list[TimedStream]:
    """All streams, so many at once, which find in prefix caches what came with the same salt. Raises RuntimeError when one
    fails."""

    def one(question: Question) -> TimedStream:
        how = {"temperature": question.temperature, "seed": question.seed, "cache_salt": cache_salt}
        return client.run(question.prompt, question.max_tokens, on_first_token=on_first_token, **how)

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(one, asked))


def first_token_ms(client: Client, scale: Scale) -> dict[str, list[float]]:
    """By prompt length: milliseconds to the first token, one prompt at a time; no two prompts are alike."""
    prompts = Prompts(SEED_FIRST)
    client.run(prompts.next(scale.ttft_prompts[0]), 2)  # connections
    return {
        str(length): [1e3 * client.run(prompts.next(length), 2).first_s for _ in range(scale.repeats)]
        for length in scale.ttft_prompts
    }


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Token ids, question by question, and what came first when."""

    streams: list[list[int]]
    killed: list[list[int]]
    first_ms: dict[str, list[float]]
    bits: str | None  # of whoever answered, as in `jdisagg.core.bits`

    def keep(self, setting: Setting) -> None:
        """For the sections that compare with them."""
        _path(setting).write_text(json.dumps(vars(self)))


def kept_answers(setting: Setting) -> Answers | None:
    """What `unified` left in this run."""
    return Answers(**json.loads(_path(setting).read_text())) if _path(setting).exists() else None


def compare(name: str, found: Sequence[TimedStream], wanted: Sequence[Sequence[int]], findings: Findings) -> None:
    """Check that every stream has the same tokens, or say where the first one parts."""
    equal = [list(stream.token_ids) == list(tokens) for stream, tokens in zip(found, wanted, strict=True)]
    detail = f"{sum(equal)} of {len(equal)}"
    if not all(equal):
        number = equal.index(False)
        pairs = enumerate(zip(found[number].token_ids, wanted[number], strict=True))
        at = next(index for index, (mine, its) in pairs if mine != its)
        detail += f"; stream {number} parts at token {at}"
    findings.check(name, all(equal), detail)


def varied(streams: Sequence[TimedStream]) -> bool:
    """Whether the streams say more than one thing: equal constants would prove nothing."""
    return sum(len(set(stream.token_ids)) for stream in streams) >= LEAST_VARIED * len(streams)


def _path(setting: Setting) -> Path:
    return setting.scratch / "answers.json"
