"""Rotary position embedding as config.json describes it: frequencies. The rotation itself is in `layers`. No jax here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.json_values import is_finite
from jdisagg.core.told import told

LONGEST = 2**40  # tokens that no config.json has positions for
_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "attn_factor", "extrapolation_factor"),
)
_AT_TOP = ("rope_parameters", "rope_scaling", "rope_theta")
_ALIKE = 0.85  # of 1: closer than keys of other kinds that models have (long_mscale)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Frequencies of the rotation. `factor` and what follows it matter for kinds that use them."""

    head_dim: int  # D
    theta: float
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192  # tokens

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeSpec:
        """Read `rope_parameters`, or the older `rope_theta` with `rope_scaling`. Raises ConfigError naming the key."""
        key, values = _given(config)
        with suppress(ArithmeticError, ValueError), np.errstate(all="ignore"):
            rope = cls._read(config, key, values, head_dim)
            factors = np.append(rope.inverse_frequencies(), np.float32(rope.attention_factor))
            if np.isfinite(factors).all() and factors[-1] > 0 and rope.longest(LONGEST) > 0:
                return rope
        raise ConfigError(f"config.json: {key} is {told(str(values))}, and no rotation follows from such numbers")

    @classmethod
    def _read(cls, config: Mapping[str, Any], key: str, values: dict[str, Any], head_dim: int) -> RopeSpec:
        theta = positive_number(values.get("rope_theta") or config.get("rope_theta") or 10000.0, "rope_theta")
        kind = values.get("rope_type", "default")
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise ConfigError(f"config.json: {key}.rope_type is {kind!r}, wanted default | linear | llama3 | yarn")
        partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise ConfigError(f"config.json: partial_rotary_factor is {partial!r}, wanted 1.0")
        if kind == "default":
            if values.get("factor") not in (None, 1.0):  # transformers leaves it out with a warning, vLLM refuses it
                raise ConfigError(f"config.json: {key}.factor is {values['factor']!r}, wanted a rope_type that uses it")
            return cls(head_dim=head_dim, theta=theta)
        if kind == "linear":
            return cls(head_dim=head_dim, theta=theta, kind=kind, factor=_number(values, key, "factor"))
        original = "original_max_position_embeddings"  # for some models it stands beside, and then counts first
        if (beside := config.get(original)) is not None:
            values[original] = beside
        if kind == "yarn":
            if values.get(original) is None:
                values[original] = config.get("max_position_embeddings")
            return YarnSpec.of(values, key, head_dim, theta)
        low, high = _number(values, key, "low_freq_factor"), _number(values, key, "high_freq_factor")
        if high <= low:
            raise ConfigError(f"config.json: {key}.high_freq_factor is {high}, wanted more than low_freq_factor = {low}")
        return cls(
            head_dim=head_dim,
            theta=theta,
            kind=kind,
            factor=_number(values, key, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_len=int(_number(values, key, original)),
        )

    def longest(self, max_position_embeddings: int) -> int:
        """Tokens that positions serve: `linear` stretches those of config.json, as vLLM counts them; llama3's are stretched."""
        return int(max_position_embeddings * max(1.0, self.factor)) if self.kind == "linear" else max_position_embeddings

    @property
    def attention_factor(self) -> float:
        """Of queries and keys, once they are turned."""
        return 1.0

    @property
    def scaling(self) -> str | None:
        """How positions are scaled, for people; None = they are not."""
        if self.kind == "default":
            return None
        made_for = "" if self.kind == "linear" else f", made for {self.original_max_len} tokens"
        return f"{self.kind}, factor {self.factor:g}{made_for}"

    def inverse_frequencies(self) -> np.ndarray:
        """f32[D/2]: radians per token of each feature pair."""
        frequencies = self._frequencies()
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        if self.kind == "llama3":
            # Long waves are stretched by `factor`, short ones kept, those between blended linearly in turns per context.
            turns = self.original_max_len * frequencies / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = np.clip(blend, 0.0, 1.0)
            frequencies = frequencies * (blend + (1.0 - blend) / self.factor)
        return frequencies.astype(np.float32)

    def _frequencies(self) -> np.ndarray:
        """f64[D/2], of no scaling."""
        return self.theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)


@dataclass(frozen=True, kw_only=True)
class YarnSpec(RopeSpec):
    """YaRN (arXiv:2309.00071): long waves are stretched by `factor`, short ones kept, those between blended linearly in the
    index of the pair; longer contexts have sharper attention."""

    sharpness: float  # the attention factor
    beta_fast: float  # turns per original context, of the first pair that is blended
    beta_slow: float  # of the last one
    truncate: bool  # to whole pairs

    @classmethod
    def of(cls, values: Mapping[str, Any], key: str, head_dim: int, theta: float) -> YarnSpec:
        """Of what config.json has under `key`. Raises ConfigError naming it."""
        if theta <= 1:
            raise ConfigError(f"config.json: rope_theta is {theta}, wanted more than 1, as {key} is yarn")
        factor = _number(values, key, "factor")
        optional = {  # transformers takes a 0 for left out, but for the first one
            name: _number(values, key, name)
            for name in ("attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            if values.get(name) not in ((None,) if name == "attention_factor" else (None, 0))
        }
        fast, slow = optional.get("beta_fast", 32.0), optional.get("beta_slow", 1.0)
        if fast <= slow:
            raise ConfigError(f"config.json: {key}.beta_fast is {fast}, wanted more than beta_slow = {slow}")
        if not isinstance(truncate := values.get("truncate", True), bool):
            raise ConfigError(f"config.json: {key}.truncate is {truncate!r}, wanted true or false")
        if (stretch := values.get("extrapolation_factor")) not in (None, 1.0):
            raise ConfigError(f"config.json: {key}.extrapolation_factor is {stretch!r}, wanted 1.0")
        if "mscale" in optional and "mscale_all_dim" in optional:
            sharpness = _sharpness(factor, optional["mscale"]) / _sharpness(factor, optional["mscale_all_dim"])
        else:
            sharpness = _sharpness(factor)
        return cls(
            head_dim=head_dim,
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_len=int(_number(values, key, "original_max_position_embeddings")),
            sharpness=optional.get("attention_factor", sharpness * optional.get("attn_factor", 1.0)),
            beta_fast=fast,
            beta_slow=slow,
            truncate=truncate,
        )

    @property
    def attention_factor(self) -> float:
        """See RopeSpec."""
        return self.sharpness

    def longest(self, max_position_embeddings: int) -> int:
        """As vLLM counts them: config.json may give either length as `max_position_embeddings`."""
        del max_position_embeddings
        return int(self.original_max_len * max(1.0, self.factor))

    def inverse_frequencies(self) -> np.ndarray:
        """See RopeSpec."""
        frequencies = self._frequencies()
        first, last = self._pair_of(self.beta_fast), self._pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        blend = (np.arange(len(frequencies)) - first) / (last - first or 0.001)
        blend = np.clip(blend, 0.0, 1.0)
        return (frequencies * (1.0 - blend + blend / self.factor)).astype(np.float32)

    def _pair_of(self, turns: float) -> float:
        """Where a pair would stand that turns so often in the original context."""
        return self.head_dim * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _sharpness(factor: float, scale: float = 1.0) -> float:
    """The paper's, of a context that is `factor` times as long."""
    return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0


def _given(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What config.json says, under the key that says it. Both keys may be there, if the one does not contradict the other."""
    for name in sorted(config.keys() - set(_AT_TOP)):
        _refuse_misspelt(name, _AT_TOP, name)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ConfigError(f"config.json: {key} is {config[key]!r}, wanted an object")
    new, old = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    for values in (new, old):
        if values:
            values["rope_type"] = values.get("rope_type") or values.pop("type", None) or "default"
    for name in sorted(new.keys() & old.keys()):
        if new[name] != old[name]:
            raise ConfigError(
                f"config.json: rope_scaling.{name} is {old[name]!r} but rope_parameters.{name} is {new[name]!r}; keep one"
            )
    key = "rope_parameters" if new else "rope_scaling"
    for name in sorted((new.keys() | old.keys()) - set(_KEYS)):
        _refuse_misspelt(name, _KEYS, f"{key if name in new else 'rope_scaling'}.{name}")
    for name, value in new.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key}.{name} is {value!r}, wanted one rotation for all layers")
    return key, {**old, **new}


def _refuse_misspelt(name: str, keys: tuple[str, ...], where: str) -> None:
    if close := difflib.get_close_matches(name, keys, n=1, cutoff=_ALIKE):
        raise ConfigError(f"config.json: {where} is no key that is read; did you mean {close[0]}?")


def _number(values: Mapping[str, Any], key: str, name: str) -> float:
    return positive_number(values.get(name), f"{key}.{name}")


def positive_number(value: Any, name: str) -> float:
    """`value`, which config.json calls `name`, as a float above 0 and below infinity. Raises ConfigError."""
    if not is_finite(value) or value <= 0:
        raise ConfigError(f"config.json: {name} is {value!r}, wanted a positive number")
    return float(value)
