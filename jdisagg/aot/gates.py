"""What must hold of every step on every kind of device, seen in what its real compiler makes of it.

    cache and state fully in place, temporaries below 5 % of the cache, no copy of the cache, no copy of a weight
    on a GPU nothing that its host has to lead

A small model of two layers, with a cache of 512 MiB on each device, or more: small caches hide copies, and what activations
need does not grow with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jdisagg.aot.abstract import AbstractEngine, ModelForm
from jdisagg.aot.accelerators import MIB, Topology, parse_topology
from jdisagg.aot.compiled import CompiledStep, compile_step
from jdisagg.aot.compilers import abstract_devices
from jdisagg.aot.table import columns, count_copies
from jdisagg.core.config import CacheConfig, Config, LayerLoop, ModelConfig, Numerics, SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.engine.sizing import size_engine
from jdisagg.kv.spec import QUANTISED
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec

TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")  # eight devices each
TPS = (1, 4, 8)
HEAD_DIMS = (64, 128)
ALL_STEPS = ("prefill", "score", "decode", "exact", "export", "import")
CACHE_BYTES = 512 * MIB  # on each device
_TPU_INT8_CACHE_BYTES = 6144 * MIB  # its scales, a 33rd of it, shall not fit into VMEM, where XLA would take them
_GPU_CACHE_BYTES = 1024 * MIB  # cuBLAS, which multiplies in the exact step, has 32 MiB to work in, whatever the sizes
MOST_TEMP = 0.05  # of the cache
_PAGE_SIZE = 16
_TPU_INT8_PAGE_SIZE = 128  # the scales of a page fill the lanes; smaller ones are left to plain XLA
# 208 tokens: no activation has the shape of a weight
_SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=208)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One engine, and the steps of it to compile."""

    topology: str
    tp: int
    head_dim: int
    kv_dtype: str = "bfloat16"
    steps: tuple[str, ...] = ("prefill", "decode")

    @property
    def page_size(self) -> int:
        """As one would serve it with, in tokens."""
        return _TPU_INT8_PAGE_SIZE if self._int8_on_tpu else _PAGE_SIZE

    @property
    def cache_bytes(self) -> int:
        """On each device."""
        if self._platform == "cuda":
            return _GPU_CACHE_BYTES
        return _TPU_INT8_CACHE_BYTES if self._int8_on_tpu else CACHE_BYTES

    @property
    def _int8_on_tpu(self) -> bool:
        return self.kv_dtype == QUANTISED and self._platform == "tpu"

    @property
    def _platform(self) -> str:
        return parse_topology(self.topology).accelerator.platform


FEW = (
    Case(topology="v5e:2x4", tp=1, head_dim=128),
    Case(topology="v5p:2x2x2", tp=4, head_dim=64),
    Case(topology="v6e:2x4", tp=8, head_dim=128, steps=("prefill", "score", "decode", "export", "import")),
    Case(topology="v6e:2x4", tp=4, head_dim=64, steps=("export",)),  # a layer of its piece has the shape of a weight
    Case(topology="tpu7x:2x2x1", tp=4, head_dim=128),
    Case(topology="v6e:2x4", tp=4, head_dim=128, kv_dtype=QUANTISED, steps=("prefill", "decode", "export", "import")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One step on one mesh."""

    topology: str
    tp: int
    head_dim: int
    kv_dtype: str
    step: CompiledStep

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold."""
        step = self.step
        if step.error is not None:
            return (f"refused: {step.error}",)
        found = []
        if not step.in_place:
            found.append(f"{(step.donated_bytes - step.aliased_bytes) / MIB:.1f} MiB not in place")
        if step.temp_bytes >= MOST_TEMP * step.cache_bytes:
            found.append(f"temp {100 * step.temp_bytes / step.cache_bytes:.0f} % of the cache")
        if step.padding_bytes >= MOST_TEMP * step.cache_bytes:
            found.append(f"arrays padded by {100 * step.padding_bytes / step.cache_bytes:.0f} % of the cache")
        found += [f"copy of a {copy.of} {copy.shape}" for copy in step.program.required_copies]
        found += [f"the host leads {name}" for name in step.program.led_by_host]
        return tuple(found)


def cases(extent: str, topology: Topology | None) -> Iterator[Case]:
    """`few`, one or two of each topology; `steps`, prefill and decode on every mesh; `all`, every step, and int8 KV too.

    `topology` restricts them to one, whose shape then counts.
    """
    if extent == "few":
        yield from FEW if topology is None else _few_of(topology) or [Case(topology=str(topology), tp=1, head_dim=128)]
        return
    for name in TOPOLOGIES if topology is None else (str(topology),):
        for tp, head_dim in itertools.product(TPS, HEAD_DIMS):
            if tp > parse_topology(name).num_devices:
                continue
            if extent == "steps":
                yield Case(topology=name, tp=tp, head_dim=head_dim)
            else:
                yield Case(topology=name, tp=tp, head_dim=head_dim, steps=ALL_STEPS)
                yield Case(topology=name, tp=tp, head_dim=head_dim, kv_dtype="int8", steps=ALL_STEPS)


def run_gates(extent: str, topology: Topology | None, progress: Callable[[str], None]) -> list[Gate]:
    """Compile every case."""
    return [gate for case in cases(extent, topology) for gate in run_case(case, progress)]


def run_case(case: Case, progress: Callable[[str], None]) -> list[Gate]:
    """Compile the steps of one case. Raises ConfigError when its compiler is not installed."""
    gates = []
    for name in case.steps:
        engine = gate_engine(case, exact=name == "exact")
        wanted = {executable.name: executable for executable in engine.executables()}  # the largest comes last
        progress(f"{case.topology} tp {case.tp} head dim {case.head_dim} {case.kv_dtype}: {name}")
        step = compile_step(engine, wanted[name])
        gates.append(Gate(topology=case.topology, tp=case.tp, head_dim=case.head_dim, kv_dtype=case.kv_dtype, step=step))
    return gates


def gate_engine(case: Case, *, exact: bool = False) -> AbstractEngine:
    """An engine whose cache on each device is just large enough to be taken seriously."""
    mesh = make_mesh(abstract_devices(parse_topology(case.topology), case.tp), case.tp)
    form = ModelForm(spec=_spec(case.head_dim), dtype="bfloat16", kv_dtype=case.kv_dtype, layer_loop=LayerLoop.UNROLLED)
    layout = form.layout(mesh, case.page_size)
    pages = -(-case.cache_bytes * case.tp // layout.bytes_per_page)
    config = Config(
        role="unified",
        model=ModelConfig(numerics=Numerics.EXACT if exact else Numerics.FAST),
        cache=CacheConfig(page_size=case.page_size, num_pages=pages),
        scheduler=_SCHEDULER,
    )
    sizes = size_engine(form.spec, layout, config, Role.UNIFIED, lambda: None)
    return AbstractEngine(form=form, mesh=mesh, page_size=case.page_size, sizes=sizes)


def render_gates(gates: Sequence[Gate]) -> str:
    """The table, failures beside their rows and counted below."""
    rows = [["step", "topology", "tp", "D", "KV", "CPU s", "temp MiB", "of cache", "in place", "copies", "holds"]]
    for gate in gates:
        step = gate.step
        rows.append(
            [
                f"{step.name} ({step.shape})",
                *(gate.topology, str(gate.tp), str(gate.head_dim), gate.kv_dtype, f"{step.compile_cpu_s:.1f}"),
                *(f"{step.temp_bytes / MIB:.2f}", f"{100 * step.temp_bytes / step.cache_bytes:.2f} %"),
                *("yes" if step.in_place else "no", count_copies(step)),
                "NO: " + "; ".join(gate.failures) if gate.failures else "yes",
            ]
        )
    failed = sum(bool(gate.failures) for gate in gates)
    return "\n".join([*columns(rows), f"{len(gates) - failed} of {len(gates)} gates hold"]) + "\n"


def _few_of(topology: Topology) -> list[Case]:
    kind = f"{topology.accelerator.name}:"
    fitting = (case for case in FEW if case.topology.startswith(kind) and case.tp <= topology.num_devices)
    return [replace(case, topology=str(topology)) for case in fitting]


def _spec(head_dim: int) -> ModelSpec:
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 4352,  # no sum of the others: q, k and v joined do not look like the head
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": head_dim,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        }
    )
