"""A report for people: tables in plain text, where their figures come from, and what was found in the compiled programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jdisagg.aot.accelerators import GIB, MIB
from jdisagg.aot.budget import Budget
from jdisagg.aot.compiled import CompiledStep
from jdisagg.aot.report import EngineReport, Report
from jdisagg.aot.roofline import StepTime
from jdisagg.aot.thunks import UNTOLD

_RULE = (
    ("usable", "the limit times --device-memory-utilization; all of it where the pool's size is given"),
    (
        "weights",
        "every parameter in --dtype, cut over the mesh as the loader cuts it; what does not divide is whole everywhere",
    ),
    ("kept for steps", "the engine's bound for decode state and temporaries: grows with --max-num-batched-tokens and slots"),
    (
        "kept for KV on its way",
        "pieces that are published or have arrived, --transfer-buffer-bytes each; with --host-kv-bytes copies out and back",
    ),
    ("KV pool", "what is left, in pages; KV heads fewer than devices are stored several times"),
    (
        "at best",
        "each weight and each row's KV read once, over the device's peak rates; nothing is faster, real steps are slower",
    ),
    (
        "expected",
        "what steps of bfloat16 models took on such devices: rates that were reached, and time for each layer and step",
    ),
    ("links", "two all-reduces a layer around a ring; added, since nothing hides them"),
)


def render(report: Report, *, explain: bool) -> str:
    """The whole report; `explain` adds where figures come from and what was found in the programs."""
    lines = [f"{report.model} on {report.topology}: {report.num_devices} x {report.device}, {_versions(report)}"]
    for engine in report.engines:
        lines += ["", *_engine(engine, report)]
        if explain:
            lines += ["", *_explanations(engine, report.source)]
    lines += ["", *(f"PROBLEM  {problem}" for problem in report.problems)]
    return "\n".join([*lines, f"verdict  {_verdict(report)}"]) + "\n"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the first row the headings: first column to the left, figures to the right, words as they are."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index in (0, len(row) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _engine(engine: EngineReport, report: Report) -> Iterator[str]:
    many = f" x {len(engine.devices)}" if len(engine.devices) > 1 else ""
    yield (
        f"{engine.role} engine{many}, tp {engine.tp}: {engine.num_params / 1e9:.2f} billion parameters in {engine.dtype}, "
        f"KV in {engine.kv_dtype}, layers {engine.layer_loop}"
    )
    yield from columns(_budget(engine.budget, report.device_memory_gib))
    if engine.steps:
        yield ""
        yield from columns(_steps(engine.steps))
        yield from _remarks(engine)
    if engine.times:
        yield ""
        yield from columns(_times(engine.times))
    yield ""
    yield from (f"PROBLEM  {problem}" for problem in engine.problems)
    yield from (f"limit    {limit}" for limit in engine.limits)
    asked = engine.budget.max_model_len
    for remedy in engine.remedies:
        shorter = f", a context shorter than the {asked:,} wanted" if remedy.max_model_len < asked else ""
        yield f"would fit: {remedy.change}: {_kv(remedy.kv_tokens, remedy.max_model_len)}{shorter}"
    if engine.budget.missing_bytes and not engine.remedies:
        yield "would fit: no single change that was tried"


def _budget(budget: Budget, memory_gib: float | None) -> list[list[str]]:
    rows = [["on each device", "GiB", ""]]
    if budget.limit_bytes is not None and budget.usable_bytes is not None and memory_gib is not None:
        share = budget.limit_bytes / GIB / memory_gib
        more = "" if share > 0.99 else f"{share:.2f} of {memory_gib:g}; XLA_CLIENT_MEM_FRACTION in the environment raises it"
        rows.append(["the runtime's limit", _gib(budget.limit_bytes), more])
        rows.append(["usable", _gib(budget.usable_bytes), f"{budget.usable_bytes / budget.limit_bytes:.2f} of it"])
    rows.append(["weights", _gib(budget.weights_bytes), ""])
    rows.append(["kept for steps", _gib(budget.steps_bytes), ""])
    if budget.moving_bytes:
        rows.append(["kept for KV on its way", _gib(budget.moving_bytes), ""])
    pages = f"{budget.num_pages:,} pages of {budget.page_size} tokens; {_kv(budget.kv_tokens, budget.max_model_len)}"
    rows.append(["KV pool", _gib(budget.pool_bytes), pages if budget.num_pages else "nothing left"])
    if budget.missing_bytes:
        what = "this pool" if budget.num_pages else f"one request of {budget.max_model_len:,} tokens"
        rows.append(["MISSING", _gib(budget.missing_bytes), f"for {what}"])
    return rows


def _steps(steps: Sequence[CompiledStep]) -> list[list[str]]:
    rows = [["step", "CPU s", "temp MiB", "in place", "copies", "collectives in a step"]]
    for step in steps:
        mark = "*" if len(step.layers) > 1 else ""
        if step.error is not None:
            rows.append([f"{step.name} ({step.shape})", f"{step.compile_cpu_s:.1f}", "-", "-", "-", "REFUSED"])
            continue
        moved = ", ".join(f"{each.count} {each.kind}" for each in step.program.collectives if not each.optional) or "none"
        rows.append(
            [
                f"{step.name} ({step.shape}){mark}",
                f"{step.compile_cpu_s:.1f}",
                f"{step.temp_bytes / MIB:.1f}",
                "all" if step.in_place else f"not {(step.donated_bytes - step.aliased_bytes) / MIB:.1f} MiB",
                count_copies(step),
                moved,
            ]
        )
    return rows


def count_copies(step: CompiledStep) -> str:
    """Copies of weights or cache that every step makes, and behind + those that some steps make."""
    required, some = len(step.program.required_copies), len(step.program.copies) - len(step.program.required_copies)
    return f"{required}+{some}" if some else str(required)


def _remarks(engine: EngineReport) -> Iterator[str]:
    shallow = next((step for step in engine.steps if len(step.layers) > 1), None)
    if shallow is not None:
        depths = " and ".join(map(str, shallow.layers))
        yield f"* compiled with {depths} layers; the figures are the straight line through them at the model's depth"
    if any(step.program.copies != step.program.required_copies for step in engine.steps):
        yield "+ copies in a branch that only some steps take"
    for step in engine.steps:
        if step.program.led_by_host == (UNTOLD,):
            yield f"{step.name} ({step.shape}): the compiler does not tell whether it is one CUDA graph"
        elif step.program.led_by_host:
            names = ", ".join(step.program.led_by_host)
            yield f"{step.name} ({step.shape}) is not one CUDA graph: the host leads {names}, and waits for the device there"
    if engine.steps_need_bytes is not None:
        kept = engine.budget.steps_bytes
        parts = "state, code, temp with results, padding of arrays"
        yield f"steps need {_gib(engine.steps_need_bytes)} GiB ({parts}), {_gib(kept)} are kept"
    if len(engine.steps) < engine.num_executables:
        yield f"{len(engine.steps)} of {engine.num_executables} executables were compiled, the largest of each kind"


def _times(times: Sequence[StepTime]) -> list[list[str]]:
    rows = [["at best", "context", "GB", "GFLOP", "memory ms", "arith. ms", "links ms", "step ms", "tokens/s", "bound by"]]
    rows[0] += ["expected ms"] * any(time.expected_s for time in times)
    for time in times:
        work = time.workload
        rows.append(
            [
                f"{work.phase} {work.tokens}",
                str(work.context),
                f"{time.num_bytes / 1e9:.2f}",
                f"{time.flops / 1e9:.0f}",
                *(f"{1e3 * each:.2f}" for each in (time.memory_s, time.arithmetic_s, time.interconnect_s, time.step_s)),
                f"{time.tokens_per_s:,.0f}",
                time.bound_by,
                *([] if time.expected_s is None else [f"{1e3 * time.expected_s:.2f}"]),
            ]
        )
    return rows


def _explanations(engine: EngineReport, source: str) -> Iterator[str]:
    """Lines for one engine; `source`: who says what its device is."""
    yield f"the runtime's limit: what the runtime lets a program use of a device ({source})"
    yield from (f"{name}: {text}" for name, text in _RULE)
    for step in engine.steps:
        state = max(0, step.donated_bytes - step.cache_bytes)
        yield (
            f"{step.name} ({step.shape}): code {step.code_bytes / MIB:.1f} MiB, state {state / MIB:.1f} MiB, "
            f"padding {step.padding_bytes / MIB:.1f} MiB, "
            f"{step.aliased_bytes / MIB:.1f} of {step.donated_bytes / MIB:.1f} MiB donated stay in place, "
            f"kernels: {', '.join(f'{count} {name}' for name, count in step.program.kernels.items()) or 'plain XLA'}"
        )
        if step.error is not None:
            yield f"    refused: {step.error}"
        for each in step.program.collectives:
            when = ", only in some steps" if each.optional else ""
            yield f"    {each.count} {each.kind} of up to {each.largest_bytes / MIB:.2f} MiB{when}"
        for copy in step.program.copies:
            when = ", only in some steps" if copy.optional else ""
            yield f"    copy of a {copy.of}: {copy.shape}, {copy.num_bytes / MIB:.1f} MiB ({copy.instruction}){when}"


def _kv(tokens: int, max_model_len: int) -> str:
    requests = tokens // max_model_len if max_model_len else 0
    return f"{tokens:,} tokens = {requests} request{'' if requests == 1 else 's'} of {max_model_len:,}"


def _verdict(report: Report) -> str:
    compiled = any(engine.steps for engine in report.engines)
    if report.fits:
        return "fits and compiles" if compiled else "fits (nothing was compiled)"
    short = max((engine.budget.missing_bytes for engine in report.engines), default=0)
    if short:
        return f"does not fit: {_gib(short)} GiB are missing on each device"
    return "does not fit" if report.problems else "does not work: see PROBLEM"


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items() if name != "jaxlib")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
