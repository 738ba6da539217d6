"""What is known of each kind of device, from data/accelerators.toml, and how many of one `--topology` names. No jax here."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jdisagg.core.errors import ConfigError

GIB, MIB = 2**30, 2**20
_MOST_CHIPS = 4096
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What steps of ours reached on one kind of device, fitted to measurements of whole models."""

    bytes_per_s: float
    flops_per_s: float
    layer_s: float  # of a step that one layer takes beside its bytes or products: kernels that begin and end
    step_s: float  # that a step takes beside its layers
    decode_call_s: float  # that the host takes to launch a decode step, while the one before runs: none is shorter

    def expected_s(self, *, num_bytes: float, flops: float, num_layers: int) -> float:
        """Of a step on one device, however soon the host launches it."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s) + num_layers * self.layer_s + self.step_s


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of device. Rates are peaks from its maker; None where there is no figure (CPU)."""

    name: str  # "v6e"
    title: str
    platform: str  # tpu | cuda | cpu
    smallest: str  # shape of the smallest slice that its compiler describes
    source: str
    hosts: tuple[str, ...] = ()  # shapes: of the largest host, and of each of several that make a slice; empty on CPU
    slices: tuple[str, ...] = ()  # shapes in which it is offered; empty: any may be
    devices_per_chip: int = 1
    memory_gib: float | None = None
    runtime_share: float = 1.0
    bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    target: str | None = None
    reached: Reached | None = None  # in bfloat16

    @property
    def num_dimensions(self) -> int:
        """Of a slice's shape: 2 or 3 on TPU, 1 elsewhere."""
        return self.smallest.count("x") + 1

    @property
    def largest_host(self) -> Topology | None:
        """The most that one worker can have; None on CPU, where devices are as many as one wants."""
        return _slice(self, self.hosts[0]) if self.hosts else None

    def limit_bytes(self, environ: Mapping[str, str] = os.environ) -> int | None:
        """Bytes that JAX's allocator on one device would count as its limit; None on CPU."""
        if self.memory_gib is None:
            return None
        share = self.runtime_share
        if self.platform == "cuda":
            share = next((_fraction(name, environ[name]) for name in _FRACTION_VARIABLES if environ.get(name)), share)
        return int(self.memory_gib * GIB * share)

    def target_text(self) -> str:
        """The target configuration of a device whose compiler wants one."""
        assert self.target is not None, f"{self.name} has no target configuration"
        return _data(self.target)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of TPU chips, some GPUs of one machine, or CPU devices."""

    accelerator: Accelerator
    shape: tuple[int, ...]  # chips per dimension

    @property
    def num_chips(self) -> int:
        """Chips, each of one device or two."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """What JAX calls devices."""
        return self.num_chips * self.accelerator.devices_per_chip

    @property
    def host(self) -> Topology:
        """What one worker can have of it: all where a host has as many chips, else one of its hosts."""
        largest = self.accelerator.largest_host
        if largest is None or self.num_devices <= largest.num_devices:
            return self
        return _slice(self.accelerator, self.accelerator.hosts[-1])

    @property
    def compile_shape(self) -> str:
        """The slice to ask the compiler about: the one wanted, rounded up to whole hosts; what is too much stays unused."""
        least = (int(size) for size in self.accelerator.smallest.split("x"))
        return "x".join(str(-(-size // unit) * unit) for size, unit in zip(self.shape, least, strict=True))

    def __str__(self) -> str:
        return f"{self.accelerator.name}:{'x'.join(map(str, self.shape))}"


def read_accelerators() -> dict[str, Accelerator]:
    """All of them by name."""
    tables: dict[str, Any] = tomllib.loads(_data("accelerators.toml"))
    return {name: _accelerator(name, **values) for name, values in tables.items()}


def parse_topology(text: str) -> Topology:
    """`v6e:2x4`, as KIND[:SHAPE]; no shape means one chip. Raises ConfigError that lists what there is."""
    known = read_accelerators()
    name, _, shape_text = text.strip().lower().partition(":")
    if name not in known:
        raise ConfigError(f"--topology: got {text!r}, wanted one of {', '.join(map(_example, known.values()))}")
    accelerator = known[name]
    wanted = accelerator.num_dimensions
    if not shape_text:
        return Topology(accelerator=accelerator, shape=(1,) * wanted)
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape_text):
        raise ConfigError(f"--topology: got {text!r}, wanted {_example(accelerator)}")
    topology = _slice(accelerator, shape_text)
    if len(topology.shape) != wanted or topology.num_chips > _MOST_CHIPS:
        raise ConfigError(
            f"--topology: got {text!r}, wanted {_example(accelerator)}, {wanted} dimensions and at most {_MOST_CHIPS} chips"
        )
    if accelerator.slices and shape_text not in accelerator.slices:
        raise ConfigError(
            f"--topology: got {text!r}, wanted a slice that {name} is offered in: {', '.join(accelerator.slices)} (of a larger "
            "one --tp uses a part)"
        )
    return topology


def _slice(accelerator: Accelerator, shape: str) -> Topology:
    return Topology(accelerator=accelerator, shape=tuple(int(size) for size in shape.split("x")))


def _accelerator(
    name: str,
    *,
    reached: Mapping[str, Any] | None = None,
    hosts: Sequence[str] = (),
    slices: Sequence[str] = (),
    **values: Any,
) -> Accelerator:
    steps = None if reached is None else Reached(**reached)
    return Accelerator(name=name, reached=steps, hosts=tuple(hosts), slices=tuple(slices), **values)


def _data(name: str) -> str:
    return (resources.files("jdisagg.aot") / "data" / name).read_text(encoding="utf-8")


def _fraction(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"{name}: got {text!r}, wanted a share of device memory between 0 and 1; correct or unset it")
    return value


def _example(accelerator: Accelerator) -> str:
    return f"{accelerator.name}:{accelerator.smallest}"
