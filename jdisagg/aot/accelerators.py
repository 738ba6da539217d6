"""What is known of each kind of device, from data/accelerators.toml. No jax here."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jdisagg.core.errors import ConfigError

GIB, MIB = 2**30, 2**20
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


def read_accelerators() -> dict[str, Accelerator]:
    """All of them by name."""
    tables: dict[str, Any] = tomllib.loads(_data("accelerators.toml"))
    return {name: _accelerator(name, **values) for name, values in tables.items()}


def _accelerator(name: str, *, reached: Mapping[str, Any] | None = None, **values: Any) -> Accelerator:
    return Accelerator(name=name, reached=None if reached is None else Reached(**reached), **values)


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
