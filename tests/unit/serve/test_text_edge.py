"""Sampling defaults are those that a model's generation_config.json recommends."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.api.generation.intake import DEFAULT_MAX_TOKENS, TextRequest
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.serve.text_edge import make_edge, read_text_model, sampling_defaults
from tests.unit.api_edge.fakes import FakeEngine, run
from tests.unit.text.tiny_tokenizer import train_byte_level


@pytest.mark.parametrize(("top_k", "wanted"), [(20, 20), (20.0, 20), (0, None), (-1, None)])
def test_a_top_k_that_is_off_is_none(tmp_path: Path, top_k: float, wanted: int | None) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": top_k, "temperature": 0.6}))
    defaults = sampling_defaults(tmp_path)
    assert (defaults.top_k, defaults.temperature) == (wanted, 0.6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", math.inf),
        pytest.param("temperature", 10**400, id="temperature-of-400-digits"),
        ("temperature", "0.6"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", math.nan),
        ("top_p", [0.5]),
        ("top_k", math.inf),
        ("top_k", math.nan),
        ("top_k", 0.5),
        ("top_k", 2**40),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 20.5),
        ("max_new_tokens", True),
        pytest.param("max_new_tokens", 10**400, id="max_new_tokens-of-400-digits"),
        ("max_new_tokens", "20"),
        ("max_new_tokens", math.nan),
    ],
)
def test_a_recommendation_that_no_request_may_have_is_the_model_s_fault(tmp_path: Path, key: str, value: object) -> None:
    """Else every client that leaves it out is told that it sent it."""
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match=f"generation_config.json: {key}"):
        read_text_model(train_byte_level(tmp_path))


def test_a_recommendation_that_is_null_is_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None, "top_k": None, "top_p": 1}))
    assert sampling_defaults(tmp_path).temperature == 1.0


@pytest.mark.parametrize(
    ("found", "chat", "prompt"), [({}, 190, 16), (40, 40, 16), (40.0, 40, 16), (7, 7, 7), (2**40, 190, 16)]
)
def test_an_answer_of_no_stated_length_is_as_long_as_the_model_recommends(
    tmp_path: Path, found: object, chat: int, prompt: int
) -> None:
    """As vLLM has it: where there is another bound, the lower one."""
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"max_new_tokens": found} if found else {"max_new_tokens": None})
    )
    text = read_text_model(train_byte_level(tmp_path))

    async def check() -> None:
        config = Config()
        edge = make_edge(FakeEngine(text.tokenizer, "fox"), text, config.server, config.model)
        for default, expected in ((None, chat), (DEFAULT_MAX_TOKENS, prompt)):
            asked = TextRequest(request_id="r", prompts=((5,) * 10,), sampling=text.defaults, default_max_tokens=default)
            (answer,) = (await edge.admit(asked)).requests
            assert answer.sampling.max_tokens == expected
            assert answer.fills_context is (expected == 190), "a shorter worker gives less of that alone"
            (named,) = (await edge.admit(replace(asked, max_tokens=100))).requests
            assert named.sampling.max_tokens == 100

    run(check())


def test_an_adapter_without_tokenizer_is_called_so(tmp_path: Path) -> None:
    """Of a fleet on one machine the router speaks first."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds an adapter \(adapter_config\.json\), wanted a whole model"):
        read_text_model(tmp_path)
