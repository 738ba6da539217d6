"""The sections of gpu_check, in order: what each shows, its share of the time, and what it cannot run without."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 470.0  # of all sections together; the budgets below add up to it
SERVER_MODULES = (
    *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.rpc", "starlette", "uvicorn", "uvloop", "httptools"),
    *("tokenizers", "prometheus_client", "jinja2", "safetensors", "xxhash", "google.protobuf"),
)
STEP_MODULES = ("jax", "flax", "safetensors", "orbax.checkpoint", "tensorstore")
BATCH_MODULES = (*STEP_MODULES, *SERVER_MODULES, "httpx", "tqdm")
WIRE_MODULES = ("jax", "grpc", "grpc_status", "google.rpc", "google.protobuf")
DISTRIBUTIONS = {  # where a module and what brings it differ in name
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "prometheus_client": "prometheus-client",
    "orbax.checkpoint": "orbax-checkpoint",
}
LEAST_VERSIONS = {"grpc": (1, 85, 1), "google.protobuf": (7, 35, 1)}  # of what generated jdisagg/v1; older ones refuse it


@dataclass(frozen=True, kw_only=True)
class Section:
    """`module` has `run(setting, findings)`. What a section does not use up of `budget_s`, later ones may."""

    name: str
    module: str
    says: str
    budget_s: float  # on an accelerator
    needs: tuple[str, ...] = ()  # Python modules
    after: str = ""  # the section whose results it compares with


SECTIONS = (
    Section(
        name="device",
        module="gpu_kit.device_section",
        says="what jax sees; copy bandwidth and matmul rate",
        budget_s=15,
        needs=("jax",),
    ),
    Section(
        name="kernels",
        module="gpu_kit.kernel_section",
        says="every implementation offered here against NumPy float64",
        budget_s=30,
        needs=("jax",),
    ),
    Section(
        name="unified",
        module="gpu_kit.engine_section",
        says="one engine: reference streams, TTFT, host overhead",
        budget_s=55,
        needs=SERVER_MODULES,
    ),
    Section(
        name="colocated",
        module="gpu_kit.engine_section",
        says="both engines in one process, the same streams",
        budget_s=30,
        needs=SERVER_MODULES,
        after="unified",
    ),
    *(
        Section(
            name=f"pair-{backend}",
            module="gpu_kit.pair_section",
            says=f"P and D as two processes over {backend}: streams, TTFT, kill -9 of P",
            budget_s=budget_s,
            needs=SERVER_MODULES,
            after="unified",
        )
        for backend, budget_s in (("jax", 40), ("grpc", 30), ("shm", 30))
    ),
    Section(
        name="cpu-decode",
        module="gpu_kit.cpu_decode_section",
        says="prefill on the accelerator, decode in a CPU process",
        budget_s=30,
        needs=SERVER_MODULES,
    ),
    Section(
        name="hazards",
        module="gpu_kit.hazard_section",
        says="what is known to kill, corrupt or hang, tried here",
        budget_s=25,
        needs=WIRE_MODULES,
    ),
    Section(
        name="moving",
        module="gpu_kit.moving_section",
        says="gather, scatter and the hand-off between two processes, GB/s",
        budget_s=30,
        needs=WIRE_MODULES,
    ),
    Section(
        name="decode",
        module="gpu_kit.decode_section",
        says="decode step against the memory roofline",
        budget_s=50,
        needs=STEP_MODULES,
    ),
    Section(
        name="prefill",
        module="gpu_kit.prefill_section",
        says="prefill step against the matmul rate",
        budget_s=35,
        needs=STEP_MODULES,
    ),
    Section(
        name="batch",
        module="gpu_kit.batch_section",
        says="jdisagg.batch beside transformers' continuous batching",
        budget_s=40,
        needs=BATCH_MODULES,
    ),
    Section(
        name="aot",
        module="gpu_kit.aot_section",
        says="what jdisagg.aot foretells, tried",
        budget_s=30,
        needs=STEP_MODULES,
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
