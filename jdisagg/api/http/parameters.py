"""What completions and chat share of reading a request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from jdisagg.api.generation.choice import Transcript
from jdisagg.api.generation.context_length import Prompt
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import BAD_WORDS, Conversion, Job, TextRequest, most_tokens
from jdisagg.api.generation.sampling_bounds import NUMBERS, check_logit_bias
from jdisagg.api.http.body import Body, wrong_type
from jdisagg.api.http.call_grammars import without_line
from jdisagg.api.http.connection import while_connected
from jdisagg.api.http.grammars import GRAMMAR, read_grammar, said_twice
from jdisagg.api.http.shapes import provenance_object, usage_object
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.json_values import is_number
from jdisagg.core.requests import SamplingParams
from jdisagg.core.trace import TRACEPARENT, read_traceparent

PROVENANCE_HEADER = "x-jdisagg-provenance"  # its client asks where its answer was computed
LENGTH, NEWER_LENGTH = "max_tokens", "max_completion_tokens"
SIDES = ("left", "right")  # of a prompt, where tokens are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions:
    """How the answer is written."""

    stream: bool
    include_usage: bool
    continuous_usage: bool  # in each chunk, of what has come so far
    return_token_ids: bool
    tokens_as_ids: bool  # in log-probabilities
    provenance: bool  # where the KV came from, under the key "jdisagg"

    @property
    def shows_more(self) -> bool:
        """Of each token, or with each chunk, than its text."""
        return self.return_token_ids or self.continuous_usage

    def with_usage(self, chunk: dict[str, Any], transcript: Transcript) -> dict[str, Any]:
        """A chunk, with what has come so far or with null, as the request has it."""
        if self.continuous_usage:
            chunk["usage"] = usage_object(transcript.usage)
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def with_origin(self, chunk: dict[str, Any], transcript: Transcript) -> dict[str, Any]:
        """A chunk, with where the KV came from if it is the last one."""
        if self.provenance and not self.include_usage and transcript.is_finished:
            chunk["jdisagg"] = provenance_object(transcript)
        return chunk

    def with_totals(self, answer: dict[str, Any], transcript: Transcript) -> dict[str, Any]:
        """A whole answer, or the chunk that ends one."""
        answer["usage"] = usage_object(transcript.usage)
        if self.provenance:
            answer["jdisagg"] = provenance_object(transcript)
        return answer


def read_options(request: Request, body: Body) -> ResponseOptions:
    """`stream`, `stream_options`, `return_token_ids`, `return_tokens_as_token_ids`, and a header."""
    stream, given = body.boolean("stream"), body.object("stream_options")
    stream_options = Body(given, where="stream_options.")
    if given and not stream:
        raise InvalidRequest.of("stream_options", "is allowed only with stream=true")
    include_usage = stream_options.boolean("include_usage")
    continuous_usage = stream_options.boolean("continuous_usage_stats")
    stream_options.refuse_misspelt()
    return ResponseOptions(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=body.boolean("return_token_ids"),
        tokens_as_ids=body.boolean("return_tokens_as_token_ids"),
        provenance=request.headers.get(PROVENANCE_HEADER) == "1",
    )


def read_request(
    body: Body, request_id: str, prompts: tuple[Prompt, ...], sampling: SamplingParams, *, add_special_tokens: bool
) -> TextRequest:
    """The body as far as both read it alike. `add_special_tokens`: whether they are put around text prompts where the body does
    not say."""
    n, seed = body.integer("n"), body.integer("seed")
    return TextRequest(
        request_id=request_id,
        prompts=prompts,
        model=body.text("model") or "",
        sampling=sampling,
        seed=None if seed == -1 else seed,  # as in vLLM
        max_tokens=_max_tokens(body),
        n=1 if n is None else n,
        stop=body.texts("stop"),
        conversion=Conversion(
            most_prompt_tokens=most_tokens(body.integer("truncate_prompt_tokens")),
            keeps_beginning=_side(body) == "right",
            add_special_tokens=body.boolean("add_special_tokens", add_special_tokens),
            skip_special_tokens=body.boolean("skip_special_tokens", True),
            bad_words=_bad_words(body, sampling),
            shows_stop=body.boolean("include_stop_str_in_output"),
        ),
        priority=body.integer("priority") or 0,
        cache_salt=body.text("cache_salt") or "",
        timeout_s=read_timeout(body),
    )


def read_timeout(body: Body) -> float | None:
    """`timeout_s`. Raises InvalidRequest."""
    timeout_s = body.number("timeout_s")
    if timeout_s is not None and not timeout_s > 0:
        raise wrong_type("timeout_s", "a number above 0", timeout_s)
    return timeout_s


def _side(body: Body) -> str:
    """`truncation_side`, as in vLLM."""
    side = body.get("truncation_side")
    if side is not None and side not in SIDES:
        raise wrong_type("truncation_side", " or ".join(SIDES), side)
    return side or "left"


def _bad_words(body: Body, sampling: SamplingParams) -> tuple[str, ...]:
    """vLLM's `bad_words`, which is a grammar, too."""
    words = () if body.get(BAD_WORDS) is False else body.texts(BAD_WORDS)
    if words and sampling.grammar is not None:
        raise said_twice(BAD_WORDS, body.names[GRAMMAR])
    if words:
        body.names[GRAMMAR] = BAD_WORDS
    return words


def _max_tokens(body: Body) -> int | None:
    """Where the body has both names of it, OpenAI's newer one counts."""
    older, newer = body.integer(LENGTH), body.integer(NEWER_LENGTH)
    if newer is not None:
        body.names[LENGTH] = NEWER_LENGTH
    return older if newer is None else newer


async def admit(edge: Edge, request: Request, body: Body, text_request: TextRequest) -> Job:
    """`Edge.admit` of what was read from `body`, whose errors name fields as that does, as later ones of the job do; Cancelled
    when the client disconnects first."""
    traceparent = read_traceparent(request.headers.get(TRACEPARENT))
    try:
        job = await while_connected(request.receive, edge.admit(replace(text_request, traceparent=traceparent)))
    except InvalidRequest as error:
        field = body.names.get(error.field or "", error.field)
        message = error.message.replace(LENGTH, body.names.get(LENGTH, LENGTH))
        if error.field == GRAMMAR:
            message = f"{field}: {without_line(message.removeprefix('grammar: '), body)}"
        raise type(error)(message, field=field) from error  # another one: this may be told to many
    return replace(job, names=body.names)


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
