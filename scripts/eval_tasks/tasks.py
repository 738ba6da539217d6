"""What each kind of task asks a model, and how its answers are scored. No model code here.

A probe is one request of `jdisagg.batch`; its answer is the first choice of the response, in OpenAI's form.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jdisagg.text.stops import Stop, StopStrings
from jdisagg.text.tokenizer import Tokenizer

WINDOW, STRIDE = 1024, 512  # tokens of perplexity windows; every token but a text's first sees at least WINDOW - STRIDE
_TEXTS = {"choice": ("context",), "generate": ("prompt", "expected", "contains"), "perplexity": ("text",)}  # by kind
Example = dict[str, Any]
Answers = dict[str, dict[str, Any]]  # probe name -> choice
Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One request. `name` is unique in its batch."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int = 0  # 0: score the prompt
    stop: tuple[str, ...] = ()

    def line(self) -> dict[str, Any]:
        """The batch line."""
        body: dict[str, Any] = {"prompt": list(self.token_ids), "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"stop": list(self.stop)} if self.max_tokens else {"echo": True, "logprobs": 0}
        return {"custom_id": self.name, "method": "POST", "url": "/v1/completions", "body": body}


class Task(Protocol):
    """One kind of task."""

    @property
    def required(self) -> tuple[str, ...]:
        """Fields of an example."""
        ...

    def probes(self, example: Example, tokenizer: Tokenizer) -> list[Probe]:
        """The requests of one example."""
        ...

    def score(self, examples: list[Example], answers: Answers, tokenizer: Tokenizer) -> Scores:
        """Named numbers over all examples."""
        ...


class Choice:
    """Which continuation has the largest summed log-probability.

    Its tokens are those after the ones it shares with the context alone: where a token spans the border, all of it counts.
    """

    required = ("id", "context", "choices", "answer")

    def probes(self, example: Example, tokenizer: Tokenizer) -> list[Probe]:
        """One per continuation. Raises ValueError for one that begins with the first token of all, which has no score."""
        probes, context = list[Probe](), tokenizer.encode(example["context"])
        for index, choice in enumerate(example["choices"]):
            token_ids = tuple(tokenizer.encode(example["context"] + choice))
            if common_length(context, token_ids) == 0:
                raise ValueError(
                    f"{example['id']}: choices[{index}] has the first token of its prompt, which has no likelihood; begin "
                    "the context with more text"
                )
            probes.append(Probe(name=f"{example['id']}/{index}", token_ids=token_ids))
        return probes

    def score(self, examples: list[Example], answers: Answers, tokenizer: Tokenizer) -> Scores:
        """Accuracy by sum and by sum per byte, and the mean log-probability (nats) of the right continuation."""
        by_sum = by_byte = 0
        right_nats = 0.0
        for example in examples:
            context = tokenizer.encode(example["context"])
            sums = [
                math.fsum(prompt_logprobs(answers, probe.name, probe.token_ids)[common_length(context, probe.token_ids) :])
                for probe in self.probes(example, tokenizer)
            ]
            per_byte = [total / len(choice.encode()) for total, choice in zip(sums, example["choices"], strict=True)]
            by_sum += _argmax(sums) == example["answer"]
            by_byte += _argmax(per_byte) == example["answer"]
            right_nats += sums[example["answer"]]
        count = len(examples)
        return {"accuracy": by_sum / count, "accuracy_per_byte": by_byte / count, "right_logprob_nats": right_nats / count}


class Generate:
    """Greedy answers against an expected text."""

    required = ("id", "prompt")

    def probes(self, example: Example, tokenizer: Tokenizer) -> list[Probe]:
        """One."""
        stop = example.get("stop") or ()
        return [
            Probe(
                name=example["id"],
                token_ids=tuple(tokenizer.encode(example["prompt"])),
                max_tokens=example.get("max_tokens", 32),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            )
        ]

    def score(self, examples: list[Example], answers: Answers, tokenizer: Tokenizer) -> Scores:
        """Shares of answers that equal `expected` (spaces around both aside), and that contain `contains` or
        `expected`; of the examples that name one."""
        texts = [answers[example["id"]]["text"] for example in examples]
        exact: list[bool] = []
        contains: list[bool] = []
        for text, example in zip(texts, examples, strict=True):
            expected, part = example.get("expected"), example.get("contains")
            if expected is not None:
                exact.append(text.strip() == expected.strip())
            if (part := expected if part is None else part) is not None:
                contains.append(part in text)
        shares = {"exact_match": exact, "contains": contains}
        return {name: sum(hits) / len(hits) for name, hits in shares.items() if hits}


class Perplexity:
    """Log-likelihood of whole texts; context starts afresh at every text, in sliding windows."""

    required = ("id", "text")

    def probes(self, example: Example, tokenizer: Tokenizer) -> list[Probe]:
        """One per window."""
        return [
            Probe(name=f"{example['id']}/{index}", token_ids=ids)
            for index, (ids, _) in enumerate(windows(tuple(tokenizer.encode(example["text"]))))
        ]

    def score(self, examples: list[Example], answers: Answers, tokenizer: Tokenizer) -> Scores:
        """Per token and per byte."""
        nats, num_tokens, num_bytes = 0.0, 0, 0
        for example in examples:
            for index, (ids, counted) in enumerate(windows(tuple(tokenizer.encode(example["text"])))):
                nats -= math.fsum(prompt_logprobs(answers, f"{example['id']}/{index}", ids)[-counted:])
                num_tokens += counted
            num_bytes += len(example["text"].encode())
        bits = nats / math.log(2)
        return {
            "nats_per_token": nats / num_tokens,
            "perplexity_token": math.exp(nats / num_tokens),
            "bits_per_byte": bits / num_bytes,
            "perplexity_byte": 2 ** (bits / num_bytes),
        }


TASKS: dict[str, Task] = {"choice": Choice(), "generate": Generate(), "perplexity": Perplexity()}


def load_examples(path: Path, kind: str) -> list[Example]:
    """The task file's lines; ids become text, an absent one the line number. Raises ValueError naming the line."""
    examples: list[Example] = []
    first: dict[str, int] = {}  # id -> its line
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                example = _read_example(number, raw, kind)
                if (earlier := first.setdefault(example["id"], number)) != number:
                    raise ValueError(f"its id {example['id']!r} is that of line {earlier}; give each its own")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            examples.append(example)
    if not examples:
        raise ValueError(f"{path} holds no example")
    return examples


def _read_example(number: int, raw: bytes, kind: str) -> Example:
    """Raises ValueError for one that cannot be scored."""
    fields = json.loads(raw)
    if not isinstance(fields, dict):
        raise ValueError(f"wanted a JSON object, got {type(fields).__name__}")
    example = {"id": number, **fields}
    example["id"] = str(example["id"])  # of a batch line it must be
    missing = [name for name in TASKS[kind].required if name not in example]
    if missing:
        raise ValueError(f"a {kind} example needs {', '.join(missing)}; it has {', '.join(example)}")
    for name in _TEXTS[kind]:
        _check_text(name, example.get(name), optional=name not in TASKS[kind].required)
    if kind == "choice":
        _check_choices(example["choices"], example["answer"])
    if kind == "generate":
        _check_limits(example.get("max_tokens", 32), example.get("stop"))
    return example


def _check_text(name: str, value: Any, *, optional: bool) -> None:
    if not isinstance(value, str) and not (optional and value is None):
        raise ValueError(f"{name} must be a text; got {value!r}")
    (value or "").encode()  # half of a surrogate pair is a ValueError


def _check_limits(max_tokens: Any, stop: Any) -> None:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens must be a whole number from 1 on; got {max_tokens!r}")
    stops = stop if isinstance(stop, list) else [stop or ""]
    if not all(isinstance(each, str) for each in stops):
        raise ValueError(f"stop must be a text or a list of texts; got {stop!r}")


def _check_choices(choices: Any, answer: Any) -> None:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices must be a list of texts; got {choices!r}")
    if isinstance(answer, bool) or not isinstance(answer, int):
        raise ValueError(f"answer must be the index of a choice; got {answer!r}")
    if "" in choices:
        raise ValueError(f"choices[{choices.index('')}] is empty: it has no likelihood")
    if not 0 <= answer < len(choices):
        raise ValueError(f"answer must be in [0, {len(choices)}); got {answer}")


def windows(ids: tuple[int, ...], most: int = WINDOW) -> list[tuple[tuple[int, ...], int]]:
    """(at most `most` ids, how many of the last ones count): every id but the first counts exactly once."""
    out: list[tuple[tuple[int, ...], int]] = []
    done = 1
    while done < len(ids):
        end = min(len(ids), most if done == 1 else done + STRIDE)
        out.append((ids[max(0, end - most) : end], end - done))
        done = end
    return out


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def scored_part(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without what no score is made of: 200 bytes a token, which of a large task's answers no memory holds."""
    kept: dict[str, Any] = {"text": choice["text"]}
    if isinstance(choice.get("logprobs"), dict):
        kept["logprobs"] = {"token_logprobs": array("d", _zero_for_none(choice["logprobs"]["token_logprobs"]))}
    return kept


def prompt_logprobs(answers: Answers, name: str, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities (nats) of the prompt's tokens; the first token has none and counts as 0. Raises ValueError when the
    answer has not one for each."""
    logprobs = answers[name].get("logprobs")
    values = _zero_for_none(logprobs["token_logprobs"]) if isinstance(logprobs, dict) else []
    if len(values) != len(token_ids):
        raise ValueError(
            f"{name} was answered with log-probabilities of {len(values)} tokens, its prompt has {len(token_ids)}: the server "
            'must take token ids as a prompt, "echo" and "logprobs"'
        )
    return values


def _zero_for_none(values: Sequence[float | None]) -> list[float]:
    return [0.0 if value is None else value for value in values]


def until_stop(text: str, stops: Sequence[str]) -> str:
    """What a server with these stop strings shows of `text`."""
    looking = StopStrings([Stop(stop) for stop in stops])
    return looking.push(text) + looking.flush()


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
