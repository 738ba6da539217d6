"""From what a client asked (text, loose parameters) to the engine requests that answer it.

Every bound is checked here, once, for HTTP and gRPC alike; the message names the field, what it got and what to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from jdisagg.api.generation.context_length import Prompt, check_length, too_long
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.api.generation.long_texts import LongTexts, Run
from jdisagg.api.generation.sampling_bounds import check_range, check_sampling, check_token_ids, invalid
from jdisagg.api.generation.scores import check_prompt_scores, most_answer_tokens, too_many_answer_scores
from jdisagg.core.errors import InvalidRequest, ModelNotFound
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import EngineRequest, Grammar, SamplingParams
from jdisagg.text.bad_words import MAX_BAD_LENGTH, MAX_BAD_WORDS, without
from jdisagg.text.stops import Stop
from jdisagg.text.thoughts import Thought, behind_thought
from jdisagg.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # of the answer to a prompt whose client does not say; a chat's is the rest of the context
MAX_N = 64
MAX_REQUEST_ID = 256  # characters: every token carries them from process to process
MAX_CACHE_SALT = 1024  # characters: every choice of every prompt carries them, too
MAX_SEQUENCES = 1024  # prompts times choices of one client request
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
BAD_WORDS = "bad_words"
_SCHEMA_WEIGHT = 4  # of what is to stand behind a thought: a schema is read and written for that, 4 ms of 11,000 characters


def most_tokens(given: int | None) -> float | None:
    """What `truncate_prompt_tokens` says of a prompt, as in vLLM: the most of it, -1 = as many as fit; None = all or none."""
    return math.inf if given == -1 else given


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How prompts become tokens, and an answer's tokens text."""

    most_prompt_tokens: float | None = None  # of a longer prompt its last ones; inf = as many as fit beside the answer
    keeps_beginning: bool = False  # of a longer prompt its first ones instead
    add_special_tokens: bool = True  # BOS / EOS around text prompts
    skip_special_tokens: bool = True  # in the text that is returned
    shown: tuple[str, ...] = ()  # special tokens that are not skipped
    thought: Thought | None = None  # that the text may begin with; what it has to be begins behind that
    bad_words: tuple[str, ...] = ()  # that the text does not hold; then there is no other grammar
    shows_stop: bool = False  # the text ends with what ended it, a stop string or the text of a token, and not before that


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """What a client asked for. `sampling`'s own `seed` and `max_tokens` are ignored: here they may be absent."""

    request_id: str
    prompts: tuple[Prompt, ...]
    model: str = ""  # "" = the one served
    sampling: SamplingParams
    seed: int | None = None  # None = drawn at intake
    max_tokens: int | None = None  # None = default_max_tokens, cut to the context
    default_max_tokens: int | None = None  # None = the rest of the context
    n: int = 1  # choices per prompt
    stop: tuple[str, ...] = ()
    echo: bool = False  # the text begins with the prompt
    conversion: Conversion = Conversion()
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None  # the client's own deadline; the server's wins when shorter
    traceparent: str = ""  # W3C trace context
    arrived_s: float | None = None  # monotonic; None = as it is admitted


@dataclass(frozen=True, kw_only=True)
class Job:
    """An admitted TextRequest. `requests` are prompt-major: choice c of prompt p is number p * n + c."""

    request_id: str
    requests: tuple[EngineRequest, ...]
    echo_texts: tuple[str, ...] | None  # one per prompt
    n: int
    stop: tuple[Stop, ...]
    scores_only: bool  # max_tokens = 0: the one token an engine request must have is dropped
    conversion: Conversion
    deadline_s: float  # monotonic
    is_aborted: bool = False  # before it began: nothing is to be computed
    names: Mapping[str, str] = field(default_factory=dict)  # of fields, as its client has them, where they are others

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """An error that came after the request was admitted, with the field at fault by its client's name."""
        name = self.names.get(error.field or "")
        return error if name is None else type(error)(error.message, field=name)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.n])


async def admit(
    request: TextRequest,
    card: ModelCard,
    tokenizer: Tokenizer,
    long_texts: LongTexts,
    grammars: GrammarGate | None,
    *,
    arrived_s: float,
    deadline_s: float,
    draw_seed: Callable[[], int],
) -> Job:
    """Check everything and build the engine requests. Raises InvalidRequest, ModelNotFound or Overloaded."""
    check_model(request.model, card)
    _check_counts(request)
    if bad_words := request.conversion.bad_words:
        request = replace(request, sampling=replace(request.sampling, grammar=without(bad_words)))
    check_sampling(request.sampling, card)
    for prompt in request.prompts:
        is_cut = request.conversion.most_prompt_tokens is not None
        check_length(prompt, card.max_model_len, tokenizer.max_token_characters, is_cut=is_cut)
    if request.sampling.grammar is not None:
        grammar = await _prepared(request, request.sampling.grammar, card, tokenizer, long_texts, grammars=grammars)
        request = replace(request, sampling=replace(request.sampling, grammar=grammar))
    has_work = request.echo or any(isinstance(prompt, str) for prompt in request.prompts)
    async with long_texts.place(sum(map(len, request.prompts)) if has_work else 0) as run:
        prompts = await _tokenize(request, card, tokenizer, run)
        echo_texts = await _echo_texts(request, prompts, card.max_model_len, tokenizer, run) if request.echo else None
    num_prompt_tokens = sum(map(len, prompts))
    most_tokens = most_answer_tokens(num_prompt_tokens, len(prompts), request.n, request.sampling)
    first_seed = draw_seed() if request.seed is None else request.seed
    default = math.inf if request.default_max_tokens is None else request.default_max_tokens
    engine_requests = []
    for number, prompt in enumerate(prompts):
        sampling = replace(
            request.sampling,
            max_tokens=_max_tokens(request, len(prompt), card.max_model_len, most_tokens),
            # a drawn seed differs by prompt, so equal prompts differ; a given one means the same answer wherever it stands
            seed=(first_seed + (number if request.seed is None else 0)) % 2**32,
        )
        if request.max_tokens == 0 < sampling.min_tokens:
            wanted = "with max_tokens = 0 no token is generated; leave it out, or raise max_tokens"
            raise invalid("min_tokens", wanted, sampling.min_tokens)
        if sampling.min_tokens > sampling.max_tokens:
            raise invalid("min_tokens", f"must be at most max_tokens = {sampling.max_tokens}", sampling.min_tokens)
        engine_requests += [
            EngineRequest(
                request_id=f"{request.request_id}/{number * request.n + choice}",
                prompt_token_ids=prompt,
                sampling=sampling,
                deadline_s=deadline_s,
                choice=choice,
                priority=request.priority,
                cache_salt=request.cache_salt,
                fork_group=f"{request.request_id}/{number}" if request.n > 1 else "",
                fills_context=request.max_tokens is None and default > card.max_model_len - len(prompt),
                traceparent=request.traceparent,
                arrived_s=arrived_s,
            )
            for choice in range(request.n)
        ]
    return Job(
        request_id=request.request_id,
        requests=tuple(engine_requests),
        echo_texts=echo_texts,
        n=request.n,
        stop=tuple(map(Stop, request.stop)),
        scores_only=request.max_tokens == 0,
        conversion=request.conversion,
        deadline_s=deadline_s,
    )


def check_model(name: str, card: ModelCard) -> None:
    """Raise ModelNotFound unless `name` is empty or the served model."""
    if name not in ("", card.name):
        raise ModelNotFound(f"model {name!r} is not served here; the served model is {card.name!r}", field="model")


async def _prepared(
    request: TextRequest,
    grammar: Grammar,
    card: ModelCard,
    tokenizer: Tokenizer,
    long_texts: LongTexts,
    *,
    grammars: GrammarGate | None,
) -> Grammar:
    """That of an answer which may begin with a thought. It is looked at as it came first: what is wrong with it is not to be
    told behind a thought."""
    await _prepare(grammar, grammars)
    if (thought := request.conversion.thought) is None:
        return grammar
    never = [each for each in tokenizer.special_ids.union(card.eos_token_ids) if each < card.vocab_size]
    async with long_texts.place(_SCHEMA_WEIGHT * len(grammar.text)) as run:
        whole = await run(partial(behind_thought, grammar, thought, never))
    await _prepare(whole, grammars)
    return whole


async def _prepare(grammar: Grammar, grammars: GrammarGate | None) -> None:
    """Whoever cannot have it is told before anything is computed."""
    if grammars is None:
        told = "answers of the served model cannot be constrained, as its tokenizer is of another kind; leave it out"
        raise InvalidRequest.of("grammar", told)
    await grammars.prepare(grammar)


def _check_counts(request: TextRequest) -> None:
    if len(request.request_id) > MAX_REQUEST_ID:
        raise invalid("request_id", f"may have at most {MAX_REQUEST_ID} characters", len(request.request_id))
    if len(request.cache_salt) > MAX_CACHE_SALT:
        raise invalid("cache_salt", f"may have at most {MAX_CACHE_SALT} characters", len(request.cache_salt))
    check_range("n", request.n, 1, MAX_N)
    if not request.prompts:
        raise invalid("prompt", "must hold at least one prompt", "none")
    num_sequences = len(request.prompts) * request.n
    if num_sequences > MAX_SEQUENCES:
        raise invalid("prompt", f"prompts times n may be at most {MAX_SEQUENCES}; send several requests", num_sequences)
    if len(request.stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"may hold at most {MAX_STOP_STRINGS} strings", len(request.stop))
    for length in map(len, request.stop):
        if not 0 < length <= MAX_STOP_LENGTH:
            raise invalid("stop", f"strings must have 1 to {MAX_STOP_LENGTH} characters", length)
    if (num_words := len(request.conversion.bad_words)) > MAX_BAD_WORDS:
        raise invalid(BAD_WORDS, f"may hold at most {MAX_BAD_WORDS} strings", num_words)
    for length in map(len, request.conversion.bad_words):
        if not 0 < length <= MAX_BAD_LENGTH:
            raise invalid(BAD_WORDS, f"strings must have 1 to {MAX_BAD_LENGTH} characters", length)
    if request.max_tokens is not None:
        check_range("max_tokens", request.max_tokens, 0, 2**31 - 1)
        if request.max_tokens == 0 and not request.echo:
            raise invalid("max_tokens", "must be at least 1, or echo must be true to score the prompt alone", 0)
    if (most := request.conversion.most_prompt_tokens) not in (None, math.inf):
        check_range("truncate_prompt_tokens", most, 1, 2**31 - 1)
    check_range("priority", request.priority, -(2**31), 2**31 - 1)


async def _tokenize(request: TextRequest, card: ModelCard, tokenizer: Tokenizer, run: Run) -> list[tuple[int, ...]]:
    """Refuses at the first prompt that shows to be one too many: those behind it may take minutes."""
    prompts: list[tuple[int, ...]] = []
    most, num_tokens = _most_prompt_tokens(request, card.max_model_len), 0
    special, first = request.conversion.add_special_tokens, request.conversion.keeps_beginning
    for prompt in request.prompts:
        if isinstance(prompt, str):
            prompt = await run(partial(tokenizer.encode, prompt, add_special_tokens=special, most=most, keeps_beginning=first))
        elif most is not None:
            prompt = prompt[:most] if first else prompt[-most:]
        if not prompt:
            raise invalid("prompt", "must hold at least one token", "none")
        check_token_ids(prompt, card.vocab_size, "prompt")
        _check_room(request, len(prompt), card.max_model_len)
        num_tokens += len(prompt)
        check_prompt_scores(num_tokens, request.n, request.sampling)
        prompts.append(prompt)
    return prompts


def _most_prompt_tokens(request: TextRequest, max_model_len: int) -> int | None:
    if (most := request.conversion.most_prompt_tokens) is None or most < math.inf:
        return None if most is None else int(most)
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    return max(1, max_model_len - wanted)


async def _echo_texts(
    request: TextRequest, prompts: list[tuple[int, ...]], max_model_len: int, tokenizer: Tokenizer, run: Run
) -> tuple[str, ...]:
    most, texts = _most_prompt_tokens(request, max_model_len), list[str]()
    for given, prompt in zip(request.prompts, prompts, strict=True):
        if isinstance(given, str) and (most is None or len(prompt) < most):  # else it may have been cut
            texts.append(given)
        else:
            skip = request.conversion.skip_special_tokens
            texts.append(await run(partial(tokenizer.decode_begun, prompt, skip_special_tokens=skip)))
    return tuple(texts)


def _check_room(request: TextRequest, num_prompt_tokens: int, max_model_len: int) -> None:
    room, wanted = max_model_len - num_prompt_tokens, max(request.max_tokens or 1, 1)
    if room < wanted:
        field = "max_tokens" if request.max_tokens is not None and room > 0 else "prompt"
        raise too_long(num_prompt_tokens, wanted, max_model_len, field, scores_only=request.max_tokens == 0)


def _max_tokens(request: TextRequest, num_prompt_tokens: int, max_model_len: int, most_tokens: int | None) -> int:
    """Tokens to generate, as the engine counts them (at least 1). `most_tokens`: as `most_answer_tokens` has it."""
    room = max_model_len - num_prompt_tokens
    if request.max_tokens is not None:
        wanted = max(request.max_tokens, 1)
        if most_tokens is not None and wanted > most_tokens:
            raise too_many_answer_scores(wanted, most_tokens)
        return wanted
    return min(count for count in (room, request.default_max_tokens, most_tokens) if count is not None)
