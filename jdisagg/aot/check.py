"""One deployment on one topology: budgets, compiled steps, step times and what follows from them."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jdisagg.aot.abstract import AbstractEngine, ModelForm
from jdisagg.aot.accelerators import GIB, Accelerator, Topology
from jdisagg.aot.budget import make_budget
from jdisagg.aot.command import Effort
from jdisagg.aot.compiled import CompiledStep, compile_step
from jdisagg.aot.compilers import abstract_devices
from jdisagg.aot.planned import PlannedEngine, planned_engines, planned_mesh
from jdisagg.aot.remedies import remedies
from jdisagg.aot.report import EngineReport, Report, limits, needed_by, sharing_problems, step_problems
from jdisagg.aot.roofline import Roofline, workloads
from jdisagg.core.config import Config, Numerics
from jdisagg.core.requests import Role
from jdisagg.engine.executables import Executable, executables
from jdisagg.engine.signatures import STATE_UPDATES
from jdisagg.engine.sizing import EngineSizes
from jdisagg.models.form import choose_dtypes, choose_layer_loop
from jdisagg.models.resolve import read_model_config
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked; `progress` is told before each compilation."""

    config: Config
    topology: Topology
    effort: Effort
    progress: Callable[[str], None]


def check(question: Question) -> Report:
    """Ask about every engine of the configuration. Raises ConfigError for what `serve` would refuse whatever the memory."""
    config, topology = question.config, question.topology
    accelerator = topology.accelerator
    spec = ModelSpec.from_config(read_model_config(config.model.model))
    dtype, kv_dtype = choose_dtypes(config.model, accelerator.platform)
    form = ModelForm(spec=spec, dtype=dtype, kv_dtype=kv_dtype, layer_loop=choose_layer_loop(config.model))
    kinds: dict[tuple[Role, int], list[PlannedEngine]] = {}
    for engine in planned_engines(config, topology):
        kinds.setdefault((engine.role, engine.tp), []).append(engine)
    engines = [_check_engine(question, form, same) for same in kinds.values()]
    return Report(
        model=config.model.model,
        topology=str(topology),
        device=accelerator.title,
        device_memory_gib=accelerator.memory_gib,
        num_devices=topology.num_devices,
        source=accelerator.source,
        versions=_versions(),
        engines=tuple(engines),
        problems=tuple(sharing_problems(engines, _shared_gib(config, accelerator), one_process=config.role == "colocated")),
    )


def _shared_gib(config: Config, accelerator: Accelerator) -> float | None:
    """What engines on one device have of it together: colocated ones, as one process, no more than its runtime takes."""
    limit = accelerator.limit_bytes()
    return accelerator.memory_gib if limit is None or config.role != "colocated" else limit / GIB


def _check_engine(question: Question, form: ModelForm, same: Sequence[PlannedEngine]) -> EngineReport:
    engine, config, accelerator = same[0], question.config, question.topology.accelerator
    budget, sizes = make_budget(form, engine, config, accelerator)
    steps = () if sizes is None else _compile_steps(question, form, engine, sizes)
    mesh = planned_mesh(accelerator.platform, engine.tp)
    roofline = Roofline(form, mesh, form.layout(mesh, config.cache.page_size), accelerator)
    works = [] if sizes is None else workloads(budget, sizes.runner, config.scheduler.max_num_seqs)
    times = [time for time in map(roofline.time, works) if time is not None]
    if config.model.numerics is Numerics.EXACT:  # its steps were not measured
        times = [replace(time, expected_s=None) for time in times]
    counts = Counter[str]() if sizes is None else Counter(each.name for each in executables(sizes.runner, sizes.device))
    problems = [*([budget.problem] if budget.problem else []), *step_problems(budget, steps, counts)]
    return EngineReport(
        role=engine.role.value,
        tp=engine.tp,
        devices=tuple(each.devices for each in same),
        layer_loop=form.layer_loop.value,
        dtype=form.dtype,
        kv_dtype=form.kv_dtype,
        num_params=form.num_params,
        budget=budget,
        num_executables=counts.total(),
        steps=tuple(steps),
        steps_need_bytes=needed_by(steps, counts) if steps else None,
        times=tuple(times),
        remedies=tuple(remedies(form, engine, config, accelerator)) if budget.problem else (),
        problems=tuple(problems),
        limits=tuple(limits(budget, config, form.spec, times)),
    )


def _compile_steps(question: Question, form: ModelForm, engine: PlannedEngine, sizes: EngineSizes) -> Sequence[CompiledStep]:
    if not question.effort.compile:
        return ()
    mesh = make_mesh(abstract_devices(question.topology.host, engine.tp), engine.tp)
    whole = AbstractEngine(form=form, mesh=mesh, page_size=question.config.cache.page_size, sizes=sizes)
    steps = []
    for executable in _chosen(whole.executables(), question.effort):
        question.progress(f"{engine.role.value}: compiling {executable.name} ({executable.shape})")
        steps.append(compile_step(whole, executable, all_layers=question.effort.all_layers))
    return steps


def _chosen(every: Iterable[Executable], effort: Effort) -> list[Executable]:
    """All, or the largest of each kind."""
    if effort.all_executables:
        return list(every)
    largest: dict[str, Executable] = {}
    for executable in every:
        if executable.name not in STATE_UPDATES:
            largest[executable.name] = max(executable, largest.get(executable.name, executable), key=lambda e: e.size)
    return list(largest.values())


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed: nothing to report of it
    return found
