"""One streamed completion over HTTP as its client sees it: tokens, text and log probabilities of each choice, and its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx

from chaos_kit.catalogue import LOWEST_TOKEN, VOCAB, Entry
from chaos_kit.choice import Choice

LIMIT_S = 60.0  # of one answer; later is a hang
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 0},  # greedy streams repeat themselves: a token more or less shows in what it was worth
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 50, "logprobs": 0},
)
_CHOICES = (1, 1, 2, 1, 1)  # its length has nothing in common with that of _KINDS: every kind meets every number
_LENGTHS = (5, 100, 250, 390)
MAX_MODEL_LEN = 640  # for the longest of both


@dataclass
class Answer:
    """`error`: None when it ended well. `named`: the server said what is wrong; else it hung or was cut off."""

    choices: dict[int, Choice] = field(default_factory=dict)
    error: str | None = None
    detail: str = ""
    named: bool = False
    seconds: float = 0.0

    def became(self, wanted: Answer) -> str:
        """`exact`, the name of its error behind nothing but what is right, or the name of a flaw, in capitals."""
        for number in wanted.choices.keys() | self.choices.keys():
            mine, right = self.choices.get(number, Choice()), wanted.choices.get(number, Choice())
            if flaw := mine.flaw_beside(right, whole=self.error is None):
                return flaw.name
        return self.error or "exact"

    def beside(self, wanted: Answer) -> str:
        """Where each choice differs first, in words."""
        told = []
        for number in sorted(wanted.choices.keys() | self.choices.keys()):
            mine, right = self.choices.get(number, Choice()), wanted.choices.get(number, Choice())
            pairs = itertools.zip_longest(mine.tokens, right.tokens)
            values = itertools.zip_longest(mine.logprobs, right.logprobs)
            for what, both in (("token", pairs), ("logprob", values)):
                found = next(((at, got, right_one) for at, (got, right_one) in enumerate(both) if got != right_one), None)
                told += [f"choice {number}, {what} {found[0]}: {found[1]} instead of {found[2]}"] if found else []
        return "; ".join(told) or "text or finish differ"


def questions(count: int) -> tuple[Entry, ...]:
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
                **_KINDS[number % len(_KINDS)],
            },
        )
        for number in range(count)
    )


async def ask(http: httpx.AsyncClient, router: str, entry: Entry, salt: str) -> Answer:
    """The answer, within LIMIT_S; `salt`: what it may find in prefix caches."""
    answer, began_s = Answer(), monotonic()
    body = {
        **entry.over_http,
        "prompt": entry.prompt,
        "n": entry.n,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            http.stream("POST", f"http://{router}/v1/completions", json=body, timeout=None) as response,
        ):
            if response.status_code == 200:
                await _read(response, answer)
            else:
                _take_error(json.loads(await response.aread()), answer)
    except TimeoutError:
        answer.error = "HANG"
    except (httpx.HTTPError, ValueError) as error:
        answer.error, answer.detail = "CUT", f"{type(error).__name__}: {error}"
    answer.seconds = monotonic() - began_s
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            message = json.loads(line.removeprefix("data: "))
            if "error" in message:
                _take_error(message, answer)
                return
            for part in message["choices"]:
                _take(part, answer.choices.setdefault(part["index"], Choice()))
    answer.error, answer.detail = "CUT", "the stream ended without [DONE]"


def _take(part: dict[str, Any], choice: Choice) -> None:
    choice.tokens += part["token_ids"] or []
    choice.text += part["text"]
    choice.finish = part["finish_reason"] or choice.finish
    if part.get("logprobs"):
        choice.logprobs += itertools.zip_longest(part["logprobs"]["token_logprobs"], part["logprobs"]["top_logprobs"] or ())


def _take_error(message: dict[str, Any], answer: Answer) -> None:
    error = message["error"]
    answer.error, answer.detail, answer.named = str(error.get("code") or error["type"]), error["message"], True
