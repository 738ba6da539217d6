"""Configuration as frozen dataclasses, one small one per part. `jdisagg.core.settings` fills them from TOML and flags.

A field's name is its flag with underscores (`page_size` is `--page-size`). Units are in the names. Nothing mutates config.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


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

    model: str = "demo"  # "demo", a directory, or a Hub id
    served_model_name: str | None = None  # None = the value of `model`
    load_format: str = "auto"  # auto | safetensors | orbax | dummy
    dtype: str = "auto"  # auto = float32 on CPU, bfloat16 elsewhere
    kv_cache_dtype: str = "auto"  # auto = dtype
    max_model_len: int | None = None  # tokens; None = the model's own, at most what the pool holds
    tensor_parallel_size: int = 1
    numerics: Numerics = Numerics.FAST
    layer_loop: LayerLoop = LayerLoop.AUTO
    tool_call_parser: str = "auto"  # auto = as the chat template writes calls | none | hermes | llama3_json | mistral


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV pool. At most one of the three sizes is given; none = utilization, on CPU 1 GiB or twice what slots take."""

    page_size: int = 16  # tokens per page
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    device_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_kv_events: bool = False  # record what enters and leaves the prefix cache, for KVEventsService
    kv_events_buffer: int = 4096  # batches a listener may be behind before it gets the whole set again


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one tick may do."""

    max_num_seqs: int = 16  # slots of the decode state
    max_num_batched_tokens: int = 512  # prefill + decode tokens per step
    long_prefill_token_threshold: int = 0  # prefill tokens per request and step; 0 = no cap of its own
    max_num_kv_read_tokens: int = 0  # tokens of KV one step may read; 0 = no bound
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step, or refused
    num_scheduler_steps: int = 1  # decode steps per dispatch when nothing needs the host in between
    scheduling_policy: str = "fcfs"  # fcfs | priority | prefill-first
    priority_aging_s: float = 10.0  # waiting this long outweighs one level of priority; 0 = never
    max_bypass: int = 16  # later requests that may take memory before one that does not fit yet
    safety_margin: float = 0.0  # share of the pool below which nothing new starts while something runs
    host_kv_bytes: int = 0  # host memory for KV of preempted and retracted requests; 0 = always recompute
    reserved_decode_tokens: int = 64  # a prompt is admitted only when this many more tokens would fit; not on P
    max_queue_len: int = 4096  # waiting requests before RESOURCE_EXHAUSTED
    schedule_log: str | None = None


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The P/D hand-off."""

    prefill: tuple[str, ...] = ()  # static peers of a decode worker, HOST:PORT
    kv_transfer_backend: str = "auto"  # auto | grpc | tcp | shm | jax | device_put (colocated)
    transfer_buffer_bytes: int = 256 * 2**20
    transfer_chunk_tokens: int = 256  # tokens of one piece
    local_prefill: LocalPrefill = LocalPrefill.ON_FAILURE
    local_prefill_below_tokens: int = 0
    want_min_tokens: int = 64  # KV of so many tokens that D holds is fetched by P instead of computed again; 0 = never
    lease_s: float = 10.0  # published pieces, and requests, outlive silence of their receiver by at most this
    checksums: bool = True
    heartbeat_s: float = 0.25
    dead_after_s: float = 1.0
    worker_wait_s: float = 30.0  # a router keeps a request that lost its worker for so long; a new one at most 5 s


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Which devices and what the runtime does with them."""

    devices: str | None = None  # "0-3" or "0,2"; None = all this role needs, from 0
    cpu_affinity: str | None = None  # "0-1"
    compilation_cache_dir: str | None = None
    step_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Edges of a process."""

    host: str = "127.0.0.1"
    advertise_host: str | None = None  # how others reach us; None = host, this machine's name for a wildcard
    advertise_port: int | None = None  # the gRPC port others use to reach us; None = grpc_port as bound
    port: int = 0  # HTTP; 0 picks a free one
    grpc_port: int = 0
    router: tuple[str, ...] = ()  # routers to register with
    allowed_origins: tuple[str, ...] = ()  # of web pages whose scripts may call the HTTP API; "*" = of any
    api_key: str | None = None  # from JDISAGG_API_KEY, or @FILE, see `keys_of`; a bare value in argv is refused
    client_api_key: str | None = None  # likewise; opens what clients use and nothing else
    default_deadline_s: float = 600.0
    drain_s: float = 30.0
    replay_budget: float = 0.5  # replays a router may start per new request, beside a floor and every live request once
    slow_request_s: float = 30.0  # requests that take longer are logged with their events and phases
    seed: int | None = None  # of requests' seeds and dummy weights; None = others at every start, weights of 0
    print_config: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """`--role local`: what the supervisor starts."""

    num_prefill: int = 1
    num_decode: int = 1
    prefill_tp: int | None = None  # None = tensor_parallel_size
    decode_tp: int | None = None


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
