"""Rotary position embedding as config.json describes it: frequencies. The rotation itself is in `layers`. No jax here."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Frequencies of the rotation. `factor` and what follows it matter for kinds that use them."""

    head_dim: int  # D
    theta: float
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192  # tokens

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeSpec:
        """Read `rope_parameters`, or the older `rope_theta` with `rope_scaling`. Raises ConfigError naming the key."""
        key, values = _given(config)
        theta = positive_number(
            values.get("rope_theta") or config.get("rope_theta") or 10000.0, "rope_theta", field="rope_theta"
        )
        kind = values.get("rope_type", "default")
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(f"config.json: {key}.rope_type is {kind!r}, wanted default | linear | llama3", field=key)
        partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise ConfigError(f"config.json: partial_rotary_factor is {partial!r}, wanted 1.0", field="partial_rotary_factor")
        if kind == "default":
            if values.get("factor") not in (None, 1.0):  # transformers leaves it out with a warning, vLLM refuses it
                raise ConfigError(
                    f"config.json: {key}.factor is {values['factor']!r}, wanted a rope_type that uses it", field=key
                )
            return cls(head_dim=head_dim, theta=theta)
        if kind == "linear":
            return cls(head_dim=head_dim, theta=theta, kind=kind, factor=_number(values, key, "factor"))
        low, high = _number(values, key, "low_freq_factor"), _number(values, key, "high_freq_factor")
        if high <= low:
            raise ConfigError(
                f"config.json: {key}.high_freq_factor is {high}, wanted more than low_freq_factor = {low}", field=key
            )
        beside = config.get("original_max_position_embeddings")  # where it stands for some models, and then counts first
        if beside is not None:
            values["original_max_position_embeddings"] = beside
        return cls(
            head_dim=head_dim,
            theta=theta,
            kind=kind,
            factor=_number(values, key, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_len=int(_number(values, key, "original_max_position_embeddings")),
        )

    def longest(self, max_position_embeddings: int) -> int:
        """Tokens that positions serve: `linear` stretches those of config.json, as vLLM counts them; llama3's are stretched."""
        return int(max_position_embeddings * max(1.0, self.factor)) if self.kind == "linear" else max_position_embeddings

    def inverse_frequencies(self) -> np.ndarray:
        """f32[D/2]: radians per token of each feature pair."""
        frequencies = self.theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        if self.kind == "llama3":
            # Long waves are stretched by `factor`, short ones kept, those between blended linearly in turns per context.
            turns = self.original_max_len * frequencies / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = np.clip(blend, 0.0, 1.0)
            frequencies = frequencies * (blend + (1.0 - blend) / self.factor)
        return frequencies.astype(np.float32)


def _given(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What config.json says, under the key that says it. Both keys may be there, if the one does not contradict the other."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ConfigError(f"config.json: {key} is {config[key]!r}, wanted an object", field=key)
    new, old = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    for values in (new, old):
        if values:
            values["rope_type"] = values.get("rope_type") or values.pop("type", None) or "default"
    for name in sorted(new.keys() & old.keys()):
        if new[name] != old[name]:
            raise ConfigError(
                f"config.json: rope_scaling.{name} is {old[name]!r} but rope_parameters.{name} is {new[name]!r}; keep one",
                field="rope_scaling",
            )
    key = "rope_parameters" if new else "rope_scaling"
    for name, value in new.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key}.{name} is {value!r}, wanted one rotation for all layers", field=key)
    return key, {**old, **new}


def _number(values: Mapping[str, Any], key: str, name: str) -> float:
    return positive_number(values.get(name), f"{key}.{name}", field=key)


def positive_number(value: Any, name: str, *, field: str) -> float:
    """`value`, which config.json calls `name`, as a float above 0 and below infinity. Raises ConfigError of `field`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"config.json: {name} is {value!r}, wanted a positive number", field=field)
    return float(value)
