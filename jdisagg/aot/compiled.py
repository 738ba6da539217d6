"""One executable through the real compiler: processor seconds, temporaries, what stays in place, collectives, copies.

A scanned model is compiled as it is served. Unrolled layers would take minutes: two shallow models are compiled instead and a
straight line through them tells of the full depth; `layers` says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jdisagg.aot.abstract import AbstractEngine, bytes_per_device
from jdisagg.aot.findings import Precious, Program, collectives, copies, kernels, led_by_host
from jdisagg.aot.hlo import parse
from jdisagg.aot.thunks import compile_with_list, led
from jdisagg.core.config import LayerLoop
from jdisagg.core.platforms import GPU_PLATFORMS
from jdisagg.engine.executables import Executable
from jdisagg.engine.signatures import MODEL_STEPS, Operand

PROBE_LAYERS = (2, 3)  # of a model whose unrolled layers are not all compiled
_MOST_LAYERS = 8  # that are all compiled when unrolled
_HLO_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "s8", "uint16": "u16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStep:
    """One executable; bytes are of one device. What the compiler refused has an `error` and zeros."""

    name: str
    shape: str
    size: int
    layers: tuple[int, ...]  # that were compiled; several: the figures are extrapolated from them
    compile_cpu_s: float  # processor seconds, which a busy machine does not stretch
    temp_bytes: int = 0
    fresh_bytes: int = 0  # of results, but those that lie in donated arguments
    code_bytes: int = 0
    padding_bytes: int = 0  # that arguments take beyond their elements, in the device's own layout
    donated_bytes: int  # of arguments that the result may take over: cache and state
    aliased_bytes: int = 0  # of them that it does
    cache_bytes: int
    program: Program = field(default_factory=Program)
    error: str | None = None

    @property
    def in_place(self) -> bool:
        """True when everything donated is updated where it lies."""
        return self.aliased_bytes >= self.donated_bytes


def compile_step(engine: AbstractEngine, executable: Executable, *, all_layers: bool = False) -> CompiledStep:
    """Compile one executable of `engine` as far as its size allows. A refusal of the compiler is a result, not an exception."""
    depth = engine.form.spec.num_layers
    if engine.form.layer_loop is LayerLoop.SCAN or all_layers or depth <= _MOST_LAYERS or executable.name not in MODEL_STEPS:
        return _compile(engine, executable)
    shallow = [_compile(engine.with_layers(layers), executable) for layers in PROBE_LAYERS]
    failed = next((step for step in shallow if step.error is not None), None)
    return failed or _extrapolate(shallow, depth, _donated(engine, executable), bytes_per_device(engine.kv))


def _compile(engine: AbstractEngine, executable: Executable) -> CompiledStep:
    spec, began_s = engine.form.spec, time.process_time()
    step = CompiledStep(
        name=executable.name,
        shape=executable.shape,
        size=executable.size,
        layers=(spec.num_layers,),
        compile_cpu_s=0.0,
        donated_bytes=_donated(engine, executable),
        cache_bytes=bytes_per_device(engine.kv),
    )
    on_gpu = engine.mesh.devices.flat[0].platform in GPU_PLATFORMS
    try:
        lowered = engine.lower(executable)
        compiled, launched = compile_with_list(lowered) if on_gpu else (lowered.compile(), "")
    except jax.errors.JaxRuntimeError as error:
        return replace(step, error=str(error).strip().splitlines()[0], compile_cpu_s=time.process_time() - began_s)
    compile_cpu_s = time.process_time() - began_s
    module, memory = parse(compiled.as_text()), compiled.memory_analysis()
    trips = spec.num_layers if engine.form.layer_loop is LayerLoop.SCAN else 1
    return replace(
        step,
        compile_cpu_s=compile_cpu_s,
        temp_bytes=memory.temp_size_in_bytes,
        fresh_bytes=max(0, memory.output_size_in_bytes - module.aliased_bytes),
        code_bytes=memory.generated_code_size_in_bytes,
        padding_bytes=max(0, memory.argument_size_in_bytes - bytes_per_device(engine.arguments(executable))),
        aliased_bytes=module.aliased_bytes,
        program=Program(
            collectives=collectives(module, trips=trips),
            copies=copies(module, _precious(engine, executable)),
            kernels=kernels(module, trips=trips),
            led_by_host=(led_by_host(module) or led(launched)) if on_gpu else (),
        ),
    )


def _donated(engine: AbstractEngine, executable: Executable) -> int:
    return sum(bytes_per_device(engine.operand(operand)) for operand in executable.signature.donates)


def _precious(engine: AbstractEngine, executable: Executable) -> Precious:
    """The arrays of the cache and, of a step that takes them, weights; of stacked ones also a single layer's."""
    has_weights = Operand.PARAMS in executable.signature.takes
    weights = {_on_device(leaf) for leaf in jax.tree.leaves(engine.params)} if has_weights else set()
    if engine.form.layer_loop is LayerLoop.SCAN:
        weights |= {(dtype, dims[1:]) for dtype, dims in weights if len(dims) > 2}
    cache = {(_on_device(leaf)[0], bytes_per_device(leaf)) for leaf in jax.tree.leaves(engine.kv)}
    return Precious(weights=frozenset(weights), cache=frozenset(cache), num_tokens=executable.size)


def _on_device(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return _HLO_NAMES.get(str(leaf.dtype), str(leaf.dtype)), tuple(leaf.sharding.shard_shape(leaf.shape))


def _extrapolate(steps: Sequence[CompiledStep], depth: int, donated_bytes: int, cache_bytes: int) -> CompiledStep:
    """The straight line through two depths, at `depth`. What both depths hold in place stays in place."""
    first, second = steps
    (near,), (far,) = first.layers, second.layers

    def line(at_near: float, at_far: float) -> float:
        return at_far + (at_far - at_near) / (far - near) * (depth - far)

    missing = max(step.donated_bytes - step.aliased_bytes for step in steps)
    return replace(
        second,
        layers=(near, far),
        compile_cpu_s=max(second.compile_cpu_s, line(first.compile_cpu_s, second.compile_cpu_s)),
        temp_bytes=max(second.temp_bytes, round(line(first.temp_bytes, second.temp_bytes))),
        code_bytes=max(second.code_bytes, round(line(first.code_bytes, second.code_bytes))),
        padding_bytes=max(second.padding_bytes, round(line(first.padding_bytes, second.padding_bytes))),
        donated_bytes=donated_bytes,
        aliased_bytes=donated_bytes - max(0, round(line(0, missing))),
        cache_bytes=cache_bytes,
        program=second.program.at_depth(first.program, line),
    )
