"""Where the figures of a report come from, and what was found in the compiled programs."""

from __future__ import annotations

from collections.abc import Iterator

from jdisagg.aot.accelerators import MIB
from jdisagg.aot.report import EngineReport

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


def explanations(engine: EngineReport, source: str) -> Iterator[str]:
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
