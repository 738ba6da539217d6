"""`--topology v6e:2x4`: a kind of device and how many there are. No jax here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jdisagg.aot.accelerators import Accelerator, read_accelerators
from jdisagg.core.errors import ConfigError

_MOST_CHIPS = 4096


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of TPU chips, some GPUs of one machine, or CPU devices."""

    accelerator: Accelerator
    shape: tuple[int, ...]  # chips per dimension

    @property
    def num_devices(self) -> int:
        """What JAX calls devices."""
        return math.prod(self.shape) * self.accelerator.devices_per_chip

    @property
    def compile_shape(self) -> str:
        """The slice to ask the compiler about: the one wanted, rounded up to whole hosts; what is too much stays unused."""
        least = (int(size) for size in self.accelerator.smallest.split("x"))
        return "x".join(str(-(-size // unit) * unit) for size, unit in zip(self.shape, least, strict=True))

    def __str__(self) -> str:
        return f"{self.accelerator.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """`KIND[:SHAPE]`; no shape means one chip. Raises ConfigError that lists what there is."""
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
    shape = tuple(int(size) for size in shape_text.split("x"))
    if len(shape) != wanted or math.prod(shape) > _MOST_CHIPS:
        raise ConfigError(
            f"--topology: got {text!r}, wanted {_example(accelerator)}, {wanted} dimensions and at most {_MOST_CHIPS} chips"
        )
    return Topology(accelerator=accelerator, shape=shape)


def _example(accelerator: Accelerator) -> str:
    return f"{accelerator.name}:{accelerator.smallest}"
