"""Requests as the engine sees them: token ids, sampling parameters, and what comes back.

A request *is* its tokens: prompt ids, the ids generated so far, and the parameters. Hand-off, retraction, replay and
fallback all carry exactly this and rebuild everything else (penalty counts, random numbers, pages) from it.
`n` choices of one client request are n engine requests that differ in `choice`; the edge makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jdisagg.core.errors import RequestError

MAX_LOGPROBS = 20  # alternatives per token, generated or prompt; more are refused at intake
MAX_STOP_TOKEN_IDS = 64  # stop ids of one request and the model's EOS ids together; more are refused at intake


class Role(Enum):
    """What an engine does. `UNIFIED` runs both phases; a colocated worker has two engines, a PREFILL and a DECODE one."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why a request ended; values are OpenAI's where OpenAI has one."""

    STOP = "stop"  # EOS, a stop token id, or (at the edge) a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client cancelled or went away
    ERROR = "error"  # `Output.error` says what


class GrammarKind(Enum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    BAD_WORDS = "bad_words"  # a JSON list of strings that the text does not hold


ALL_GRAMMARS = frozenset(GrammarKind)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text has to be. Where it stands follows from the generated tokens alone: no state of it travels."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one token is chosen. Temperature 0 is greedy. `None` switches a filter off."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0  # u32; the edge assigns one when the client gave none
    max_tokens: int = 16  # tokens to generate in all, those already in `generated_token_ids` included
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # number of alternatives per generated token; 0 = the chosen one only
    prompt_logprobs: int | None = None  # likewise per prompt token, computed inside prefill
    grammar: Grammar | None = None  # only tokens that keep to it are sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One sequence to generate. Immutable: a replay is a new one with more `generated_token_ids` and attempt + 1."""

    request_id: str  # unique among live requests; "cmpl-7/2" is choice 2 of "cmpl-7"
    prompt_token_ids: tuple[int, ...]  # at least one
    sampling: SamplingParams
    deadline_s: float  # absolute, on this process's monotonic clock
    generated_token_ids: tuple[int, ...] = ()  # tokens a former attempt has already delivered
    attempt: int = 0
    choice: int = 0
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # prefix-cache tenancy
    fork_group: str = ""  # live requests of one group with one prompt share its KV; the choices of one client prompt
    prefill_peers: tuple[str, ...] = ()  # for D: addresses of P in order of preference; empty = those it knows itself
    fills_context: bool = False  # no max_tokens was asked for: it is what the model leaves, and a shorter worker gives less
    num_asked: int = 1  # workers that are asked before it is refused: full ones share out who comes again
    traceparent: str = ""  # W3C trace context of the client's call, carried along and logged; empty = none came
    gathered: bool = False  # nobody reads its tokens before its end: they may come many in one output; not told to others
    arrived_s: float | None = None  # when a client's call came to this process, same clock; None = not a client's, or not here

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token whose KV must exist before the next one can be sampled."""
        return self.prompt_token_ids + self.generated_token_ids

    @property
    def num_tokens(self) -> int:
        """How many those are; `token_ids` of a resumed request costs a copy."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def grammar_kind(self) -> GrammarKind | None:
        """What its grammar is written in: not every worker serves each; None = it has none."""
        return None if self.sampling.grammar is None else self.sampling.grammar.kind

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to generate."""
        return self.sampling.max_tokens - len(self.generated_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (nats) of one token and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a request's prompt KV came from: shown by quickstart, in HTTP's `jdisagg` object and in gRPC's `Choice`."""

    prefill_worker: str = ""  # "pid 123 @ 127.0.0.1:9000", or its address if it died: the last that brought KV; "" = none did
    decode_worker: str = ""
    prefilled_tokens: int = 0  # computed for this request, prefix hits left out
    transferred_tokens: int = 0
    transferred_pages: int = 0  # in the receiver's page size
    transferred_bytes: int = 0
    borrowed_tokens: int = 0  # the other way: KV of the prompt that the prefill worker fetched instead of computing it
    borrowed_bytes: int = 0
    # rungs taken, in order: "refetch", "other_backend", "other_prefill", "reconnect", "local_prefill", "replay"
    recoveries: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Output:
    """What one request produced in one tick. The last one of a request has `finish` set; exactly one such is sent.

    Never changed; not frozen, since that makes the construction of one per token three times as slow.
    """

    request_id: str
    attempt: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, when asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per prompt token (first None), sent once
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS / stop id that ended it; it is the last of `token_ids`
    error: RequestError | None = None
    cached_tokens: int = 0  # prompt tokens served from a prefix cache; valid on the last output
    provenance: Provenance | None = None  # on the first output with a token, and on the last
    fingerprint: str | None = None  # a router's: of the worker that answers; None = there is only one, the model card's
