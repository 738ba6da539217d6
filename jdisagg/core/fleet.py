"""What a fleet knows about its members: who they are, what they serve, how busy they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from jdisagg.core.fingerprint import Parts
from jdisagg.core.requests import GrammarKind, Role
from jdisagg.core.speed import Speed

MAX_PREFILL_PEERS = 4  # that one request may try
SUSPECT_S = 5.0  # how long others are asked before a worker that failed, by routers, and by D before a P it could not reach
DRAINING = "it is draining"  # why a peer is not asked
Key = tuple[str, str]  # what tells a process from all others, and from the one before it: address and epoch
WHERE_TO_LOOK = "--advertise-host and --advertise-port, and at firewalls"  # of one that is there, and not reached


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How busy a worker is; what least-loaded choice looks at."""

    running: int = 0  # requests in slots
    waiting: int = 0  # requests in queues
    free_pages: int = 0
    total_pages: int = 0
    pending_prefill_tokens: int = 0
    speed: Speed | None = None  # at which a prefill worker computes those; None = it has not seen, or is too old to say


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of itself at every heartbeat."""

    load: Load
    draining: bool = False
    not_ready: str = ""  # why it cannot serve now; "" = it can
    alone: bool = False  # a decode worker that reaches none of the prefill workers it knows: others are asked first
    uptime_s: int = 0  # since it was ready, begun seconds count; 0 = it is too old to say


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """What a served model promises."""

    name: str  # served name
    max_model_len: int  # prompt + generated tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str  # weights + config + numerics; requests never cross it
    # Equal on two workers where an answer that one began may go on at the other: both compute the same, and end it by the same
    # tokens (of generation_config.json, say, which is no part of the fingerprint).
    answers: str = field(init=False)

    def __post_init__(self) -> None:
        ends = ", ".join(str(token_id) for token_id in sorted(set(self.eos_token_ids)))
        answers = f"{self.fingerprint} with end tokens {ends}" if ends else self.fingerprint
        object.__setattr__(self, "answers", answers)  # once: every request is compared with all workers


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """What operators are shown of a worker's process, and nobody else goes by; "" and 0 = it is too old to say."""

    build: str = ""  # the version of its jdisagg
    http_address: str = ""  # HOST:PORT of its HTTP server
    uptime_s: int = 0  # as it said last, see Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One worker as it registers. `epoch` changes at every start of its process."""

    role: Role
    address: str  # HOST:PORT of its gRPC server
    worker: str  # "pid 123 @ 127.0.0.1:9000"
    epoch: str
    process: ProcessFacts = ProcessFacts()
    card: ModelCard
    fingerprint_parts: Parts = ()  # of the card's
    text_digest: str = ""  # of its tokenizer and chat template; "" = it has none, or is too old to say
    load: Load = field(default_factory=Load)
    draining: bool = False
    not_ready: str = ""  # why it cannot serve now; "" = it can, or is too old to say
    cache_tokens: int = 0  # that its prefix cache holds at most; 0 = it is too old to say
    grammars: frozenset[GrammarKind] = frozenset()  # requests with one of these may be sent to it
    bits: str = ""  # what it computes, as in `jdisagg.core.bits`
    needs_prefill: bool = False  # a decode worker that never computes prompts and has no prefill worker of its own
    alone: bool = False  # as it said last, see Report

    @property
    def key(self) -> Key:
        """Which process it is."""
        return self.address, self.epoch

    def reporting(self, report: Report) -> Member:
        """The same worker, with what it says now."""
        said = {"draining": report.draining, "not_ready": report.not_ready, "alone": report.alone}
        return replace(self, load=report.load, process=replace(self.process, uptime_s=report.uptime_s), **said)

    @property
    def decodes(self) -> bool:
        """Whether it takes whole requests (WorkerService); a prefill worker only serves peers."""
        return self.role is not Role.PREFILL


class State(Enum):
    """What a router makes of one of its workers, in a word."""

    SERVING = "serving"
    DRAINING = "draining"  # it ends what it has
    NOT_READY = "not-ready"  # by its own word
    CONNECTING = "connecting"  # its Run stream does not stand yet, or not any more
    UNREACHED = "unreached"  # nor did it in several attempts
    SILENT = "silent"  # its Run stream stands, and says nothing
    UNPAIRED = "unpaired"  # it would serve, and all on the other side have other weights
    SUSPECT = "suspect"  # it failed somebody lately: others are asked first


@dataclass(frozen=True, slots=True)
class Standing:
    """What a router makes of one of its workers."""

    state: State
    why: str  # "" = nothing more to say
    requests: int  # of this router that it has
    missing_without: str = ""  # what nobody would do any more, did it drain; "" = others do its work, or it does none


@dataclass(frozen=True, kw_only=True, slots=True)
class LostWorker:
    """One that a router had, and lost."""

    role: Role
    worker: str
    why: str
    ago_s: float
