"""What `jdisagg.aot` says of a deployment, as data, `dataclasses.asdict` of which is the JSON; and what follows from budgets,
compiled steps and step times: problems that keep an engine from running, and its limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdisagg.aot.accelerators import GIB
from jdisagg.aot.budget import Budget
from jdisagg.aot.compiled import CompiledStep
from jdisagg.aot.remedies import Remedy
from jdisagg.aot.roofline import StepTime
from jdisagg.core.config import Config
from jdisagg.engine.signatures import MODEL_STEPS
from jdisagg.kv.pool import MIN_PAGES
from jdisagg.models.spec import ModelSpec

_BOUND = {"memory": "memory bandwidth", "arithmetic": "arithmetic", "interconnect": "the links between devices"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """One kind of engine of the deployment."""

    role: str
    tp: int
    devices: tuple[tuple[int, ...], ...]  # of each engine of this kind
    layer_loop: str
    dtype: str
    kv_dtype: str
    num_params: int
    budget: Budget
    num_executables: int
    steps: tuple[CompiledStep, ...]
    steps_need_bytes: int | None  # beside weights and pool: what the engine keeps `budget.steps_bytes` for
    times: tuple[StepTime, ...]
    remedies: tuple[Remedy, ...]
    problems: tuple[str, ...]
    limits: tuple[str, ...]  # what holds it back although it fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole answer. `fits`: every engine would start, on its devices together."""

    model: str
    topology: str
    device: str
    device_memory_gib: float | None
    num_devices: int
    source: str
    versions: dict[str, str]
    engines: tuple[EngineReport, ...]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """No problem anywhere."""
        return not self.problems and not any(engine.problems for engine in self.engines)


def needed_by(steps: Sequence[CompiledStep], counts: Mapping[str, int]) -> int:
    """Bytes of one device that steps need beside weights and pool: decode state, the code of all, the most that one needs for
    temporaries and results, and what the device's layout adds to weights, pool and state. `counts`: executables that the engine
    has, by name."""
    state = max((step.donated_bytes - step.cache_bytes for step in steps if step.name in MODEL_STEPS), default=0)
    temp = max((step.temp_bytes + step.fresh_bytes for step in steps), default=0)
    return state + _code_bytes(steps, counts) + temp + max((step.padding_bytes for step in steps), default=0)


def _code_bytes(steps: Sequence[CompiledStep], counts: Mapping[str, int]) -> int:
    """Of all executables, which stay loaded: one that was not compiled is taken for the largest of its kind."""
    by_name: dict[str, list[int]] = {}
    for step in steps:
        by_name.setdefault(step.name, []).append(step.code_bytes)
    return sum(sum(each) + max(0, counts.get(name, 0) - len(each)) * max(each) for name, each in by_name.items())


def step_problems(budget: Budget, steps: Sequence[CompiledStep], counts: Mapping[str, int]) -> list[str]:
    """Steps that the compiler refuses, and steps that need more than the device has left."""
    found = [f"{step.name} ({step.shape}) does not compile: {step.error}" for step in steps if step.error is not None]
    wanted = needed_by(steps, counts)
    taken = budget.weights_bytes + budget.pool_bytes + budget.moving_bytes + wanted
    over = 0 if budget.limit_bytes is None or not steps else taken - budget.limit_bytes
    if over > 0:
        found.append(
            f"steps need {wanted / GIB:.2f} GiB beside weights, pool and KV on its way, {over / GIB:.2f} GiB more than the "
            "device has; lower --max-num-batched-tokens, --max-num-seqs or --device-memory-utilization"
        )
    return found


def limits(budget: Budget, config: Config, spec: ModelSpec, times: Sequence[StepTime]) -> list[str]:
    """What holds back an engine that fits, or memory for one that does not."""
    found = []
    slots = config.scheduler.max_num_seqs
    if budget.problem is not None:
        return ["device memory"] if budget.missing_bytes else []
    if config.model.max_model_len is None and budget.max_model_len < spec.max_model_len:
        found.append(f"KV memory: requests of at most {budget.max_model_len:,} of the model's {spec.max_model_len:,} tokens")
    if budget.full_requests < slots:
        found.append(
            f"KV memory: of --max-num-seqs {slots}, {budget.full_requests} requests can have {budget.max_model_len:,} tokens "
            f"at once, or all of them {budget.kv_tokens // slots:,}"
        )
    for phase in ("decode", "prefill"):
        of_phase = [time for time in times if time.workload.phase == phase]
        if of_phase:  # of the most rows the longest context
            largest = max(of_phase, key=lambda time: (time.workload.rows, time.workload.context))
            found.append(f"{phase}: {_BOUND[largest.bound_by]}")
    return found


def sharing_problems(engines: Sequence[EngineReport], memory_gib: float | None, *, one_process: bool) -> list[str]:
    """Engines on one device, which have `memory_gib` of it together. In one process what the first has taken counts as in use
    for the next, for which a share then leaves nothing: `serve` refuses that."""
    if memory_gib is None:
        return []
    taken: dict[int, list[EngineReport]] = {}
    for engine in engines:
        for devices in engine.devices:
            for device in devices:
                taken.setdefault(device, []).append(engine)
    fullest = max(taken.values(), key=lambda on_it: sum(engine.budget.total_bytes for engine in on_it))
    if len(fullest) < 2:
        return []
    how_many, total = f"{len(fullest)} engines share a device", sum(engine.budget.total_bytes for engine in fullest)
    if one_process and any(engine.budget.is_share for engine in fullest):
        return [
            f"{how_many}: a share of it for the first one's pool leaves nothing for the next; {_sizes(fullest, memory_gib)}"
        ]
    if total <= memory_gib * GIB:
        return []
    share = f"--device-memory-utilization {0.9 / len(fullest):.2f}"
    by_share = f"give each a share ({share}), a smaller --kv-cache-bytes, or devices of its own"
    advice = _sizes(fullest, memory_gib) if one_process else by_share
    return [f"{how_many} and take {total / GIB:.1f} GiB of its {memory_gib:.6g}; {advice}"]


def _sizes(engines: Sequence[EngineReport], memory_gib: float) -> str:
    """The largest pools with which engines of one shape fit a device together."""
    budget = engines[0].budget
    room = int(memory_gib * GIB) - sum(engine.budget.total_bytes - engine.budget.pool_bytes for engine in engines)
    num_pages = room // len(engines) // budget.page_bytes
    if num_pages < MIN_PAGES:
        return "their weights leave no room for pools: give them devices of their own"
    return (
        f"give each pool a size, --num-pages {num_pages} or --kv-cache-bytes {num_pages * budget.page_bytes} at most, or "
        "devices of its own"
    )
