"""The text edge of a process that serves clients: tokenizer, chat template and sampling defaults of one model directory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.api.generation.sampling_bounds import check_ranges
from jdisagg.api.generation.token_engine import TokenEngine
from jdisagg.api.http.call_format import choose_call_format
from jdisagg.api.http.thoughts import choose_marks
from jdisagg.core.config import ModelConfig, ServerConfig
from jdisagg.core.errors import ConfigError, InvalidRequest
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import SamplingParams
from jdisagg.models.resolve import check_whole, generation_defaults, recommended_max_tokens
from jdisagg.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """What turns text into requests. Read it before anything that takes long: it may be what is wrong with a directory."""

    tokenizer: Tokenizer
    defaults: SamplingParams
    max_new_tokens: int | None = None  # of answers whose clients do not say; None = the model's authors do not, either


def read_text_model(directory: Path) -> TextModel:
    """Raises ConfigError when `directory` holds no usable tokenizer, or recommends sampling parameters that are none."""
    if not (directory / "tokenizer.json").is_file():
        check_whole(directory)
    defaults, max_new_tokens = sampling_defaults(directory), recommended_max_tokens(directory)
    return TextModel(tokenizer=Tokenizer.from_directory(directory), defaults=defaults, max_new_tokens=max_new_tokens)


def make_edge(
    engine: TokenEngine,
    text: TextModel,
    server: ServerConfig,
    model: ModelConfig,
    metrics: Metrics | None = None,
    *,
    grammars: GrammarGate | None = None,
) -> Edge:
    """An Edge over `engine`; `metrics`, `grammars`: see Edge."""
    return Edge(
        engine,
        text.tokenizer,
        default_deadline_s=server.default_deadline_s,
        defaults=text.defaults,
        max_new_tokens=text.max_new_tokens,
        draw_seed=partial(Random(server.seed).getrandbits, 32),
        metrics=metrics,
        source=model.model,
        grammars=grammars,
        call_format=choose_call_format(model.tool_call_parser, text.tokenizer.chat),
        thought_marks=choose_marks(model.reasoning_parser, text.tokenizer),
    )


def sampling_defaults(directory: Path) -> SamplingParams:
    """What a request that names no sampling parameters gets: the model's own recommendation. A top_k of 0 or -1 means none.
    Raises ConfigError for what no request may ask for: clients that leave it out would be told that they sent it."""
    values: dict[str, Any] = dict(generation_defaults(directory))
    if "top_k" in values:
        values["top_k"] = int(values["top_k"]) if values["top_k"] > 0 else None
    defaults = SamplingParams(**values)
    try:
        check_ranges(defaults)
    except InvalidRequest as error:
        raise ConfigError(f"{directory / 'generation_config.json'}: {error.message}; change it there") from error
    return defaults
