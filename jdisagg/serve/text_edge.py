"""The text edge of a process that serves clients: tokenizer, chat template and sampling defaults of one model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jdisagg.api.edge import Edge
from jdisagg.api.token_engine import TokenEngine
from jdisagg.core.config import ServerConfig
from jdisagg.core.requests import SamplingParams
from jdisagg.models.resolve import generation_defaults
from jdisagg.text.tokenizer import Tokenizer


def make_edge(engine: TokenEngine, directory: Path, server: ServerConfig) -> Edge:
    """An Edge over `engine` for the model in `directory`. Raises ConfigError when it holds no tokenizer."""
    return Edge(
        engine,
        Tokenizer.from_directory(directory),
        default_deadline_s=server.default_deadline_s,
        defaults=sampling_defaults(directory),
    )


def sampling_defaults(directory: Path) -> SamplingParams:
    """What a request that names no sampling parameters gets: the model's own recommendation. A top_k of 0 means none."""
    values: dict[str, Any] = dict(generation_defaults(directory))
    if "top_k" in values:
        values["top_k"] = int(values["top_k"]) or None
    return SamplingParams(**values)
