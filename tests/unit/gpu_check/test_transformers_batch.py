"""What transformers' continuous batching is timed by, and how its settings are called."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from gpu_kit.transformers_batch import CPU_PAGE, cpu_sizes, span


@dataclass
class Answer:
    created_time: float
    lifespan: tuple[float, float]


@dataclass
class Bare:
    generated_tokens: tuple[int, ...] = ()


@dataclass
class Config517:
    block_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None


@dataclass
class Config523:
    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    block_size: int | None = None


def test_the_time_is_from_the_first_request_to_the_last_token_and_not_the_call_around_it() -> None:
    answers = [Answer(100.0, (100.5, 103.0)), Answer(100.1, (101.0, 104.5)), Answer(100.2, (100.9, 102.0))]
    assert span(answers, 30.0) == (4.5, "requests' own stamps")


@pytest.mark.parametrize("answers", [[Bare()], [Answer(100.0, (-1, -1))], [Answer(100.0, (101.0, 190.0))], []])
def test_without_stamps_that_make_sense_the_whole_call_counts(answers: list[Answer | Bare]) -> None:
    seconds, timed_by = span(answers, 30.0)
    assert seconds == 30.0
    assert timed_by.startswith("the whole call")


@pytest.mark.parametrize(("config", "name"), [(Config517, "block_size"), (Config523, "page_size")])
def test_the_page_of_the_cache_is_called_as_this_version_has_it(config: type, name: str) -> None:
    assert getattr(config(**cpu_sizes(config)), name) == CPU_PAGE
