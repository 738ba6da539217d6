"""The parameters that completions and chat share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jdisagg.api.generation.intake import SpecialTokens
from jdisagg.api.generation.sampling_bounds import NUMBERS, check_logit_bias
from jdisagg.api.http.body import Body, wrong_type
from jdisagg.api.http.grammars import read_grammar
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.json_values import is_number
from jdisagg.core.requests import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions:
    """How the answer is written."""

    stream: bool
    include_usage: bool
    continuous_usage: bool  # in each chunk, of what has come so far
    return_token_ids: bool
    provenance: bool  # where the KV came from, under the key "jdisagg"

    @property
    def shows_more(self) -> bool:
        """Of each token, or with each chunk, than its text."""
        return self.return_token_ids or self.continuous_usage


def read_options(body: Body, *, provenance: bool) -> ResponseOptions:
    """`stream`, `stream_options`, `return_token_ids`."""
    stream, given = body.boolean("stream"), body.object("stream_options")
    stream_options = Body(given, where="stream_options.")
    if given and not stream:
        raise InvalidRequest("stream_options: is allowed only with stream=true", field="stream_options")
    include_usage = stream_options.boolean("include_usage")
    continuous_usage = stream_options.boolean("continuous_usage_stats")
    stream_options.refuse_misspelt()
    return ResponseOptions(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=body.boolean("return_token_ids"),
        provenance=provenance,
    )


def read_special_tokens(body: Body, *, add: bool) -> SpecialTokens:
    """`add`: whether they are put around text prompts where the body does not say."""
    return SpecialTokens(
        add=body.boolean("add_special_tokens", add),
        skip=body.boolean("skip_special_tokens", True),
    )


def read_timeout_s(body: Body) -> float | None:
    """`timeout_s`: how long its client waits; None where the body does not say."""
    timeout_s = body.number("timeout_s")
    if timeout_s is not None and not timeout_s > 0:
        raise wrong_type("timeout_s", "a number above 0", timeout_s)
    return timeout_s


def length_name(body: Body) -> str:
    """How the body names its max_tokens; where it has both, OpenAI's newer name counts."""
    newer = "max_completion_tokens"
    return "max_tokens" if body.integer(newer) is None else newer


def name_length(error: InvalidRequest, body: Body) -> None:
    """From now on `error` calls it by that name."""
    name = length_name(body)
    if error.field == "max_tokens":
        error.field = name
    error.message = error.message.replace("max_tokens", name)


def read_seed(body: Body) -> int | None:
    """`seed`; -1 is none, as in vLLM."""
    seed = body.integer("seed")
    return None if seed == -1 else seed


def read_sampling(body: Body, defaults: SamplingParams, *, logprobs: int | None) -> SamplingParams:
    """Sampling parameters; what the body leaves out comes from `defaults`. Ranges are checked at intake."""
    numbers = {name: body.number(name) for name in NUMBERS}
    return replace(
        defaults,
        **{name: value for name, value in numbers.items() if value is not None},
        top_k=_top_k(body, defaults.top_k),
        logit_bias=_logit_bias(body.object("logit_bias")),
        min_tokens=body.integer("min_tokens") or 0,
        ignore_eos=body.boolean("ignore_eos"),
        stop_token_ids=body.integers("stop_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=body.integer("prompt_logprobs"),
        grammar=read_grammar(body),
    )


def _top_k(body: Body, default: int | None) -> int | None:
    """0 and -1 mean off, as in vLLM."""
    value = body.integer("top_k")
    if value is None:
        return default
    return None if value in (0, -1) else value


def _logit_bias(entries: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Keys are token ids written as strings."""
    check_logit_bias(len(entries))
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        try:
            token_id = int(key)
            if str(token_id) != key:  # 1_0 and 05 are numbers to Python, too
                raise ValueError(key)
        except ValueError:
            raise wrong_type("logit_bias", "an object whose keys are token ids", key) from None
        if not is_number(bias):
            raise wrong_type("logit_bias", "an object whose values are numbers", bias)
        biases[token_id] = bias
    return tuple(sorted(biases.items()))
