"""What `jdisagg.aot` says of a deployment, as data: `dataclasses.asdict` of it is the JSON."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.aot.budget import Budget
from jdisagg.aot.compiled import CompiledStep
from jdisagg.aot.remedies import Remedy
from jdisagg.aot.roofline import StepTime


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
