"""The table of flags: for every field of `jdisagg.core.config` its section, bounds, choices and help. `settings` reads it.

A field's type and default stay in the dataclass; a test checks that table and dataclasses name the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROLES = ("unified", "prefill", "decode", "colocated", "router", "local")
_DECODERS = ("unified", "decode", "colocated", "local")
_WORKERS = ("unified", "prefill", "decode", "colocated")
_LOCAL_PREFILL = ("decode", "colocated", "local")
_OVER_A_WIRE = ("auto", "grpc", "tcp", "shm", "jax")
_TWO_KINDS = ("local", "colocated")  # one command starts engines of both kinds


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `name` is the TOML key; the command-line flag is `--` + the name with dashes."""

    section: str  # TOML section = field of Config
    name: str
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    syntax: str = ""  # "" | "bytes" (512MiB) | "ranges" (0-3,5) | "addresses" (HOST:PORT,..) | "host" | "origins" | "secret"
    aliases: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # the roles it is for; () = every role with an engine, or all (see `core.scope`)
    role_choices: tuple[tuple[str, tuple[str, ...]], ...] = ()  # roles that choose among fewer
    role: str = ""  # the choices are this role's

    @property
    def option(self) -> str:
        """The flag as typed."""
        return "--" + self.name.replace("_", "-")

    def of(self, role: str | None) -> Flag:
        """The flag with the choices that the role has; None = not known."""
        of_roles = dict(self.role_choices)
        return replace(self, choices=of_roles[role], role=role) if role in of_roles else self


_MODEL = (
    Flag("model", "model", "'demo', a directory, or a Hub id (local cache first)"),
    Flag("model", "served_model_name", "name clients use; default: the value of --model"),
    Flag("model", "load_format", "how weights are stored", choices=("auto", "safetensors", "orbax", "dummy")),
    Flag(
        "model",
        "dtype",
        "weights and activations; auto = float32 on CPU, bfloat16 elsewhere",
        choices=("auto", "float32", "bfloat16"),
    ),
    Flag("model", "kv_cache_dtype", "KV cache; auto = --dtype", choices=("auto", "float32", "bfloat16", "float16", "int8")),
    Flag("model", "max_model_len", "prompt + generated tokens; default: the model's own", minimum=8),
    Flag("model", "tensor_parallel_size", "devices per model", minimum=1, maximum=1024),
    Flag("model", "numerics", "exact: a token never depends on its neighbours, bit for bit"),
    Flag("model", "layer_loop", "layers in a Python loop, or lax.scan for a short compilation"),
    Flag(
        "model",
        "tool_call_parser",
        "how the model writes tool calls of its own accord; auto = as its chat template does; none = they stay text",
        choices=("auto", "none", "hermes", "llama3_json", "mistral"),
    ),
)
_CACHE = (
    Flag("cache", "page_size", "tokens per KV page", minimum=1, maximum=1024, aliases=("block_size",)),
    Flag("cache", "num_pages", "size of the pool in pages (page 0 is never used)", minimum=2),
    Flag("cache", "kv_cache_bytes", "size of the pool in bytes, e.g. 512MiB", minimum=1, syntax="bytes"),
    Flag(
        "cache",
        "device_memory_utilization",
        "size of the pool by share of device memory; on CPU at most 1 GiB instead",
        minimum=0.01,
        maximum=1,
    ),
    Flag("cache", "enable_prefix_caching", "reuse KV of equal prefixes"),
    Flag("cache", "enable_kv_events", "publish changes of the prefix cache over gRPC (KVEventsService)"),
    Flag("cache", "kv_events_buffer", "batches a listener may be behind before it gets the whole set again", minimum=1),
)
_SCHEDULER = (
    Flag("scheduler", "max_num_seqs", "sequences decoded together", minimum=1, maximum=65536),
    Flag("scheduler", "max_num_batched_tokens", "tokens per step", minimum=1, maximum=2**24),
    Flag("scheduler", "long_prefill_token_threshold", "prompt tokens per request and step; 0 = no cap", minimum=0),
    Flag("scheduler", "max_num_kv_read_tokens", "tokens of KV one step may read; 0 = no bound", minimum=0),
    Flag("scheduler", "enable_chunked_prefill", "compute long prompts over several steps"),
    Flag(
        "scheduler",
        "num_scheduler_steps",
        "decode steps per dispatch when nothing needs the host",
        minimum=1,
        maximum=64,
        only=_DECODERS,
    ),
    Flag(
        "scheduler",
        "scheduling_policy",
        "order of waiting requests; prefill-first also computes prompts before it decodes",
        choices=("fcfs", "priority", "prefill-first"),
    ),
    Flag("scheduler", "priority_aging_s", "waiting that outweighs one level of priority; 0 = never", minimum=0),
    Flag("scheduler", "max_bypass", "later requests that may start before one that lacks memory", minimum=0),
    Flag("scheduler", "safety_margin", "share of free pages below which nothing new starts", minimum=0, maximum=0.9),
    Flag(
        "scheduler",
        "host_kv_bytes",
        "host memory for KV of retracted requests, e.g. 2GiB",
        minimum=0,
        syntax="bytes",
        only=_DECODERS,
    ),
    Flag("scheduler", "reserved_decode_tokens", "tokens a prompt must leave room for before it is admitted", minimum=0),
    Flag("scheduler", "max_queue_len", "waiting requests before new ones are refused", minimum=1),
    Flag("scheduler", "schedule_log", "write every call of the scheduler and its result to this file"),
)
_TRANSFER = (
    Flag(
        "transfer",
        "prefill",
        "prefill workers of a decode worker, with or without a router (its routers tell it of more), HOST:PORT,..",
        syntax="addresses",
        only=("decode",),
    ),
    Flag(
        "transfer",
        "kv_transfer_backend",
        "what moves KV; auto = shm on one host, else tcp, else grpc, which every choice falls back to; "
        "within a colocated process always device_put",
        choices=(*_OVER_A_WIRE, "device_put"),
        role_choices=(
            *((role, _OVER_A_WIRE) for role in ("prefill", "decode", "local")),
            ("colocated", ("auto", "device_put")),
        ),
    ),
    Flag("transfer", "transfer_buffer_bytes", "bytes in flight per worker", minimum=1, syntax="bytes"),
    Flag("transfer", "transfer_chunk_tokens", "tokens of one KV piece", minimum=1),
    Flag("transfer", "local_prefill", "when decode prefills itself: on-failure, never, below-tokens=N", only=_LOCAL_PREFILL),
    Flag(
        "transfer",
        "want_min_tokens",
        "tokens a receiver holds from which on prefill fetches instead of computing them; 0 = never",
        minimum=0,
        only=("prefill", "colocated", "local"),
    ),
    Flag("transfer", "lease_s", "life of published KV, and of requests, after their receiver fell silent", minimum=0.1),
    Flag("transfer", "checksums", "verify every KV piece"),
    Flag("transfer", "heartbeat_s", "period of heartbeats", minimum=0.01),
    Flag("transfer", "dead_after_s", "silence after which a peer is dead", minimum=0.02),
    Flag(
        "transfer",
        "worker_wait_s",
        "how long a router keeps a request that lost its worker for another one; new requests wait at most 5 s",
        minimum=0,
        only=("router", "local"),
    ),
)
_DEVICE = (
    Flag("device", "devices", "device indices, e.g. 0-3; default: as many as needed, from 0", syntax="ranges"),
    Flag("device", "cpu_affinity", "CPU cores this process may use, e.g. 0-1", syntax="ranges"),
    Flag("device", "compilation_cache_dir", "where compiled programs are kept; 'off' keeps none"),
    Flag("device", "step_timeout_s", "a step that takes longer ends the process", minimum=0.1),
)
_SERVER = (
    Flag("server", "host", "address to bind"),
    Flag(
        "server",
        "advertise_host",
        "name or address that routers and peers use to reach this process",
        syntax="host",
        only=_WORKERS,
    ),
    Flag(
        "server",
        "advertise_port",
        "gRPC port that routers and peers use to reach this process, where something forwards to it",
        minimum=1,
        maximum=65535,
        only=_WORKERS,
    ),
    Flag("server", "port", "HTTP port; 0 picks a free one", minimum=0, maximum=65535),
    Flag("server", "grpc_port", "gRPC port; 0 picks a free one", minimum=0, maximum=65535),
    Flag(
        "server",
        "router",
        "routers a worker registers with, HOST:PORT,..; of a name with several addresses, the one at each",
        syntax="addresses",
        only=_WORKERS,
    ),
    Flag(
        "server",
        "allowed_origins",
        "web pages whose scripts may call the HTTP API (CORS): SCHEME://HOST[:PORT],.., or '*' for any; default: none",
        syntax="origins",
    ),
    Flag(
        "server",
        "api_key",
        "@FILE holding the key that opens everything, and that the processes of a fleet share (or set JDISAGG_API_KEY); "
        "of several lines all are taken and the first is sent",
        syntax="secret",
    ),
    Flag(
        "server",
        "client_api_key",
        "@FILE holding another key, for clients: it opens the HTTP API and GenerationService alone "
        "(or set JDISAGG_CLIENT_API_KEY); each line is one",
        syntax="secret",
    ),
    Flag("server", "default_deadline_s", "deadline of requests that bring none, and the longest one may bring", minimum=0.1),
    Flag("server", "drain_s", "time running requests get after SIGTERM", minimum=0),
    Flag(
        "server",
        "replay_budget",
        "replays per new request that a fleet affords, beside a floor and every live request once a minute",
        minimum=0,
        maximum=100,
        only=("router", "local"),
    ),
    Flag("server", "slow_request_s", "requests that take longer are logged with their life; 0 = all", minimum=0),
    Flag(
        "server",
        "seed",
        "seed of the seeds of requests that bring none, and of dummy weights; default: others after every start, weights of 0",
        minimum=0,
        maximum=2**32 - 1,
    ),
    Flag("server", "print_config", "print the effective configuration as TOML and exit"),
)
_LOCAL = (
    Flag("local", "num_prefill", "prefill workers --role local starts", minimum=0, maximum=64, only=("local",)),
    Flag("local", "num_decode", "decode workers --role local starts", minimum=1, maximum=64, only=("local",)),
    Flag(
        "local",
        "prefill_tp",
        "devices per prefill worker; default: --tensor-parallel-size",
        minimum=1,
        maximum=1024,
        only=_TWO_KINDS,
    ),
    Flag(
        "local",
        "decode_tp",
        "devices per decode worker; default: --tensor-parallel-size",
        minimum=1,
        maximum=1024,
        only=_TWO_KINDS,
    ),
)
FLAGS: tuple[Flag, ...] = _MODEL + _CACHE + _SCHEDULER + _TRANSFER + _DEVICE + _SERVER + _LOCAL
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(flag.section for flag in FLAGS))
# every name a key may have, aliases included -> its flag
BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases)}
