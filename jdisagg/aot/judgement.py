"""What follows from budgets, compiled steps and step times: problems that keep an engine from running, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdisagg.aot.abstract import MODEL_STEPS
from jdisagg.aot.accelerators import GIB
from jdisagg.aot.budget import Budget
from jdisagg.aot.compiled import CompiledStep
from jdisagg.aot.report import EngineReport
from jdisagg.aot.roofline import StepTime
from jdisagg.core.config import Config
from jdisagg.models.spec import ModelSpec

_BOUND = {"memory": "memory bandwidth", "arithmetic": "arithmetic", "interconnect": "the links between devices"}


def needed_by(steps: Sequence[CompiledStep], counts: Mapping[str, int]) -> int:
    """Bytes of one device that steps need beside weights and pool: decode state, the code of all, the largest temporaries,
    and what the device's layout adds to weights, pool and state. `counts`: executables that the engine has, by name."""
    state = max((step.donated_bytes - step.cache_bytes for step in steps if step.name in MODEL_STEPS), default=0)
    temp = max((step.temp_bytes for step in steps), default=0)
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
    over = (
        0 if budget.limit_bytes is None or not steps else budget.weights_bytes + budget.pool_bytes + wanted - budget.limit_bytes
    )
    if over > 0:
        found.append(
            f"steps need {wanted / GIB:.2f} GiB beside weights and pool, {over / GIB:.2f} GiB more than the device has; lower "
            "--max-num-batched-tokens, --max-num-seqs or --device-memory-utilization"
        )
    return found


def limits(budget: Budget, config: Config, spec: ModelSpec, times: Sequence[StepTime]) -> list[str]:
    """What holds back an engine that fits, or memory for one that does not."""
    found = []
    slots = config.scheduler.max_num_seqs
    if budget.problem is not None:
        return ["device memory"]
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


def sharing_problems(engines: Sequence[EngineReport], memory_gib: float | None) -> list[str]:
    """Engines on one device, which have `memory_gib` of it together."""
    if memory_gib is None:
        return []
    taken: dict[int, list[EngineReport]] = {}
    for engine in engines:
        for devices in engine.devices:
            for device in devices:
                taken.setdefault(device, []).append(engine)
    fullest = max(taken.values(), key=lambda on_it: sum(engine.budget.total_bytes for engine in on_it))
    total = sum(engine.budget.total_bytes for engine in fullest)
    if len(fullest) < 2 or total <= memory_gib * GIB:
        return []
    return [
        f"{len(fullest)} engines share a device and take {total / GIB:.1f} GiB of its {memory_gib:.6g}; give each a share "
        f"(--device-memory-utilization {0.9 / len(fullest):.2f}), a smaller --kv-cache-bytes, or devices of its own"
    ]
