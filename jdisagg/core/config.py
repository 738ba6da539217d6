"""Configuration as frozen dataclasses, one small one per part. `jdisagg.core.settings` fills them from TOML and flags.

A field's name is its flag with underscores (`page_size` is `--page-size`). Units are in the names. Nothing mutates config.
Beside its default stand what `--help` says of it, its bounds and the roles it is for; `jdisagg.core.flags` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_DECODERS = ("unified", "decode", "colocated", "local")
_WORKERS = ("unified", "prefill", "decode", "colocated")
_LOCAL_PREFILL = ("decode", "colocated", "local")
_OVER_A_WIRE = ("auto", "grpc", "tcp", "shm", "jax")
_TWO_KINDS = ("local", "colocated")  # one command starts engines of both kinds


LEAST_MODEL_LEN = 8  # tokens of the shortest context; a worker's first request, its own, has six


def _flag(default: Any, help: str, **more: Any) -> Any:
    """A field that is a flag. `more`: what else a `jdisagg.core.flags.Flag` has."""
    return field(default=default, metadata={"help": help, **more})


class Numerics(Enum):
    """`EXACT`: a token depends on weights, prefix and settings alone, bit for bit. `FAST`: batch shape may show in bits."""

    EXACT = "exact"
    FAST = "fast"


class LocalPrefill(Enum):
    """When a decode worker may prefill by itself."""

    ON_FAILURE = "on-failure"
    NEVER = "never"
    BELOW_TOKENS = "below-tokens"  # `below-tokens=N`: prompts shorter than N never leave D; on failure too


class LayerLoop(Enum):
    """Python loop over per-layer weights, or `lax.scan` over stacked ones."""

    AUTO = "auto"
    UNROLLED = "unrolled"
    SCAN = "scan"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, in what precision."""

    model: str = _flag("demo", "'demo', a directory, or a Hub id (local cache first)")
    served_model_name: str | None = _flag(None, "name clients use; default: the value of --model")
    load_format: str = _flag("auto", "how weights are stored", choices=("auto", "safetensors", "orbax", "dummy"))
    dtype: str = _flag(
        "auto", "weights and activations; auto = float32 on CPU, bfloat16 elsewhere", choices=("auto", "float32", "bfloat16")
    )
    kv_cache_dtype: str = _flag("auto", "KV cache; auto = --dtype", choices=("auto", "float32", "bfloat16", "float16", "int8"))
    # None = the model's own, at most what the pool holds
    max_model_len: int | None = _flag(None, "prompt + generated tokens; default: the model's own", minimum=LEAST_MODEL_LEN)
    tensor_parallel_size: int = _flag(1, "devices per model", minimum=1, maximum=1024)
    numerics: Numerics = _flag(Numerics.FAST, "exact: a token never depends on its neighbours, bit for bit")
    layer_loop: LayerLoop = _flag(LayerLoop.AUTO, "layers in a Python loop, or lax.scan for a short compilation")
    tool_call_parser: str = _flag(
        "auto",
        "how the model writes tool calls of its own accord; auto = as its chat template does; none = they stay text",
        choices=("auto", "none", "hermes", "llama3_json", "mistral"),
    )
    reasoning_parser: str = _flag(
        "auto",
        "how the model writes what it thinks; auto = <think>..</think> where tokenizer and template know it; none = as content",
        choices=("auto", "none", "deepseek_r1"),
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV pool. At most one of the three sizes is given; none = utilization, on CPU 1 GiB or twice what slots take."""

    page_size: int = _flag(16, "tokens per KV page", minimum=1, maximum=1024, aliases=("block_size",))
    # an array whose size in bytes is no int64 ends the process, in XLA
    num_pages: int | None = _flag(None, "size of the pool in pages (page 0 is never used)", minimum=2, maximum=10**9)
    kv_cache_bytes: int | None = _flag(
        None, "size of the pool in bytes, e.g. 512MiB", minimum=1, maximum=10**18, syntax="bytes"
    )
    device_memory_utilization: float = _flag(
        0.9, "size of the pool by share of device memory; on CPU at most 1 GiB instead", minimum=0.01, maximum=1
    )
    enable_prefix_caching: bool = _flag(True, "reuse KV of equal prefixes")
    enable_kv_events: bool = _flag(False, "publish changes of the prefix cache over gRPC (KVEventsService)")
    kv_events_buffer: int = _flag(
        4096, "batches a listener may be behind before it gets the whole set again", minimum=1, maximum=10**9
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one tick may do."""

    max_num_seqs: int = _flag(16, "sequences decoded together", minimum=1, maximum=65536)  # slots of the decode state
    max_num_batched_tokens: int = _flag(512, "tokens per step", minimum=1, maximum=2**24)  # prefill + decode
    long_prefill_token_threshold: int = _flag(0, "prompt tokens per request and step; 0 = no cap", minimum=0)
    max_num_kv_read_tokens: int = _flag(0, "tokens of KV one step may read; 0 = no bound", minimum=0)
    enable_chunked_prefill: bool = _flag(True, "compute long prompts over several steps")  # False: each in one step
    num_scheduler_steps: int = _flag(
        1, "decode steps per dispatch when nothing needs the host", minimum=1, maximum=64, only=_DECODERS
    )
    scheduling_policy: str = _flag(
        "fcfs",
        "order of waiting requests; prefill-first also computes prompts before it decodes",
        choices=("fcfs", "priority", "prefill-first"),
    )
    priority_aging_s: float = _flag(10.0, "waiting that outweighs one level of priority; 0 = never", minimum=0)
    max_bypass: int = _flag(16, "later requests that may start before one that lacks memory", minimum=0)
    # only while something runs
    safety_margin: float = _flag(0.0, "share of free pages below which nothing new starts", minimum=0, maximum=0.9)
    # 0 = always recompute
    host_kv_bytes: int = _flag(
        0, "host memory for KV of retracted requests, e.g. 2GiB", minimum=0, syntax="bytes", only=_DECODERS
    )
    # not on P
    reserved_decode_tokens: int = _flag(64, "tokens a prompt must leave room for before it is admitted", minimum=0)
    max_queue_len: int = _flag(4096, "waiting requests before new ones are refused", minimum=1)  # RESOURCE_EXHAUSTED
    schedule_log: str | None = _flag(None, "write every call of the scheduler and its result to this file")


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The P/D hand-off."""

    prefill: tuple[str, ...] = _flag(
        (),
        "prefill workers of a decode worker, with or without a router (its routers tell it of more), HOST:PORT,..",
        syntax="addresses",
        only=("decode",),
    )
    kv_transfer_backend: str = _flag(
        "auto",
        "what moves KV; auto = shm on one host, else tcp, else grpc, which every choice falls back to; "
        "within a colocated process always device_put",
        choices=(*_OVER_A_WIRE, "device_put"),
        role_choices=(
            *((role, _OVER_A_WIRE) for role in ("prefill", "decode", "local")),
            ("colocated", ("auto", "device_put")),
        ),
    )
    transfer_buffer_bytes: int = _flag(256 * 2**20, "bytes in flight per worker", minimum=1, syntax="bytes")
    transfer_chunk_tokens: int = _flag(256, "tokens of one KV piece", minimum=1, maximum=2**24)
    local_prefill: LocalPrefill = _flag(
        LocalPrefill.ON_FAILURE, "when decode prefills itself: on-failure, never, below-tokens=N", only=_LOCAL_PREFILL
    )
    local_prefill_below_tokens: int = 0  # no flag of its own: the N of below-tokens
    want_min_tokens: int = _flag(
        64,
        "tokens a receiver holds and prefill lacks, from which on they are fetched, not computed; 0 = never",
        minimum=0,
        only=("prefill", "colocated", "local"),
    )
    # at most so long
    lease_s: float = _flag(10.0, "life of published KV, and of requests, after their receiver fell silent", minimum=0.1)
    checksums: bool = _flag(True, "verify every KV piece")
    heartbeat_s: float = _flag(0.25, "period of heartbeats", minimum=0.01)
    dead_after_s: float = _flag(1.0, "silence after which a peer is dead", minimum=0.02, maximum=10**9)
    worker_wait_s: float = _flag(
        30.0,
        "how long a router keeps a request that lost its worker for another one; new requests wait at most 5 s",
        minimum=0,
        only=("router", "local"),
    )


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Which devices and what the runtime does with them."""

    devices: str | None = _flag(None, "device indices, e.g. 0-3; default: as many as needed, from 0", syntax="ranges")
    cpu_affinity: str | None = _flag(None, "CPU cores this process may use, e.g. 0-1", syntax="ranges")
    compilation_cache_dir: str | None = _flag(None, "where compiled programs are kept; 'off' keeps none")
    step_timeout_s: float = _flag(30.0, "a step that takes longer ends the process", minimum=0.1)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Edges of a process."""

    host: str = _flag("127.0.0.1", "address to bind")
    # None = host, this machine's name for a wildcard
    advertise_host: str | None = _flag(
        None, "name or address that routers and peers use to reach this process", syntax="host", only=_WORKERS
    )
    # None = grpc_port as bound
    advertise_port: int | None = _flag(
        None,
        "gRPC port that routers and peers use to reach this process, where something forwards to it",
        minimum=1,
        maximum=65535,
        only=_WORKERS,
    )
    port: int = _flag(0, "HTTP port; 0 picks a free one", minimum=0, maximum=65535)
    grpc_port: int = _flag(0, "gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    router: tuple[str, ...] = _flag(
        (),
        "routers a worker registers with, HOST:PORT,..; of a name with several addresses, the one at each",
        syntax="addresses",
        only=_WORKERS,
    )
    allowed_origins: tuple[str, ...] = _flag(
        (),
        "web pages whose scripts may call the HTTP API (CORS): SCHEME://HOST[:PORT],.., or '*' for any; default: none",
        syntax="origins",
    )
    # see `jdisagg.core.values.keys_of`; a bare value in argv is refused
    api_key: str | None = _flag(
        None,
        "@FILE holding the key that opens everything, and that the processes of a fleet share (or set JDISAGG_API_KEY); "
        "of several lines all are taken and the first is sent",
        syntax="secret",
    )
    client_api_key: str | None = _flag(
        None,
        "@FILE holding another key, for clients: it opens the HTTP API and GenerationService alone "
        "(or set JDISAGG_CLIENT_API_KEY); each line is one",
        syntax="secret",
    )
    default_deadline_s: float = _flag(600.0, "deadline of requests that bring none, and the longest one may bring", minimum=0.1)
    drain_s: float = _flag(30.0, "time running requests get after SIGTERM", minimum=0)
    replay_budget: float = _flag(
        0.5,
        "replays per new request that a router affords, beside a floor and every live request once a minute",
        minimum=0,
        maximum=100,
        only=("router", "local"),
    )
    # with their events and phases
    slow_request_s: float = _flag(30.0, "requests that take longer are logged with their life; 0 = all", minimum=0)
    seed: int | None = _flag(
        None,
        "seed of the seeds of requests that bring none, and of dummy weights; default: others after every start, weights of 0",
        minimum=0,
        maximum=2**32 - 1,
    )
    print_config: bool = _flag(False, "print the effective configuration as TOML and exit")


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """`--role local`: what the supervisor starts."""

    num_prefill: int = _flag(1, "prefill workers --role local starts", minimum=0, maximum=64, only=("local",))
    num_decode: int = _flag(1, "decode workers --role local starts", minimum=1, maximum=64, only=("local",))
    prefill_tp: int | None = _flag(
        None, "devices per prefill worker; default: --tensor-parallel-size", minimum=1, maximum=1024, only=_TWO_KINDS
    )
    decode_tp: int | None = _flag(
        None, "devices per decode worker; default: --tensor-parallel-size", minimum=1, maximum=1024, only=_TWO_KINDS
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything one process needs."""

    role: str = "local"  # unified | prefill | decode | colocated | router | local
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    local: LocalConfig = field(default_factory=LocalConfig)

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model.served_model_name or self.model.model

    @property
    def prefill_tp(self) -> int:
        """Devices of a prefill engine where one command starts both kinds (roles local and colocated)."""
        return self.local.prefill_tp or self.model.tensor_parallel_size

    @property
    def decode_tp(self) -> int:
        """Devices of a decode engine where one command starts both kinds."""
        return self.local.decode_tp or self.model.tensor_parallel_size
