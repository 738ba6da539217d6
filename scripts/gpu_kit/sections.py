"""The sections of gpu_check, in order: what each shows, its share of the time, and what it cannot run without."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_kit.findings import Target
from gpu_kit.targets import BATCHED, DECODE, FORETOLD_8B, FORETOLD_BYTES, FORETOLD_TIME, HANDOFF, OF_TCP, PREFILL

TOTAL_S = 545.0  # of all sections together, so that who grants 560 s gets a whole report; the budgets add up to a tenth more
KERNELS = ("jax", "flax")
STEP = (*KERNELS, "safetensors", "orbax.checkpoint", "tensorstore", "huggingface_hub", "tokenizers", "xxhash", "uvloop")
SERVER = (
    *STEP,
    *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.rpc", "google.protobuf", "starlette", "uvicorn"),
    *("httptools", "prometheus_client", "jinja2", "llguidance"),
)
BATCH = (*SERVER, "httpx", "tqdm")
WIRE = ("jax", "grpc", "grpc_status", "google.rpc", "google.protobuf", "xxhash")
MOVING = (*WIRE, "flax", "tokenizers", "llguidance")
DISTRIBUTIONS = {  # where a module and what brings it differ in name
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
    "orbax.checkpoint": "orbax-checkpoint",
}
LEAST_VERSIONS = {"grpc": (1, 85, 1), "google.protobuf": (7, 35, 1)}  # of what generated jdisagg/v1; older ones refuse it
PAIR = "P and D as two processes over {}: streams, TTFT, kill -9 of P"


@dataclass(frozen=True)
class Section:
    """`module` has `run(setting, findings)`. What a section does not use up of `budget_s`, later ones may."""

    name: str
    module: str
    says: str
    budget_s: float  # on an accelerator
    needs: tuple[str, ...] = ()  # Python modules
    after: str = ""  # the section whose results it compares with
    targets: tuple[Target, ...] = ()


SECTIONS = (
    Section("device", "gpu_kit.device_section", "what jax sees; copy bandwidth and matmul rate", 15, ("jax",)),
    Section("kernels", "gpu_kit.kernel_section", "every implementation offered here against NumPy float64", 40, KERNELS),
    Section("unified", "gpu_kit.engine_section", "one engine: reference streams, TTFT, host overhead", 45, SERVER),
    Section("colocated", "gpu_kit.engine_section", "both engines in one process, the same streams", 30, SERVER, "unified"),
    Section("pair-jax", "gpu_kit.pair_section", PAIR.format("jax"), 35, SERVER, "unified"),
    Section("pair-grpc", "gpu_kit.pair_section", PAIR.format("grpc"), 35, SERVER, "unified"),
    Section("pair-shm", "gpu_kit.pair_section", PAIR.format("shm"), 35, SERVER, "unified"),
    Section("cpu-decode", "gpu_kit.cpu_decode_section", "prefill on the accelerator, decode in a CPU process", 35, SERVER),
    Section("hazards", "gpu_kit.hazard_section", "what is known to kill, corrupt or hang, tried here", 20, WIRE),
    Section(
        *("moving", "gpu_kit.moving_section", "gather, scatter and the hand-off between two processes, GB/s", 50, MOVING),
        targets=(HANDOFF, OF_TCP),
    ),
    Section(
        "decode", "gpu_kit.decode_section", "decode step against the memory roofline", 60, STEP, targets=(DECODE, FORETOLD_8B)
    ),
    Section("prefill", "gpu_kit.prefill_section", "prefill step against the matmul rate", 45, STEP, targets=(PREFILL,)),
    Section(
        *("batch", "gpu_kit.batch_section", "jdisagg.batch beside transformers' continuous batching", 120, BATCH),
        targets=(BATCHED,),
    ),
    Section(
        *("aot", "gpu_kit.aot_section", "what jdisagg.aot foretells, tried", 40, STEP),
        targets=(FORETOLD_BYTES, FORETOLD_TIME),
    ),
)
BY_NAME = {section.name: section for section in SECTIONS}


def picked(names: str | None) -> list[Section]:
    """The sections named by "a,b" (None: all), in order, with those they compare with, and `device`, which says where we are.

    Raises ValueError for unknown names.
    """
    if names is None:
        return list(SECTIONS)
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := wanted - BY_NAME.keys():
        raise ValueError(f"{', '.join(sorted(unknown))} unknown, wanted some of {', '.join(BY_NAME)}")
    wanted |= {BY_NAME[name].after for name in wanted} - {""} | {SECTIONS[0].name}
    return [section for section in SECTIONS if section.name in wanted]
