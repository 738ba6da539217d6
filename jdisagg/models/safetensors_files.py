"""Which tensors lie in which safetensors file, from headers alone. No jax here: a broken checkpoint is seen at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jdisagg.core.errors import ConfigError
from jdisagg.core.files import why
from jdisagg.models.resolve import INDEX, read_object, weight_files

DERIVED = (".rotary_emb.inv_freq",)  # buffers in old checkpoints that follow from config.json
_QUANTIZED = re.compile(  # what GPTQ, AWQ, bitsandbytes, compressed-tensors and fp8 checkpoints call the parts of a weight
    r".*\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|weight_packed|weight_scale|weight_scale_inv|weight_zero_point)"
)
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def has_safetensors(directory: Path) -> bool:
    """True when `load_safetensors` has something to read."""
    return bool((directory / INDEX).is_file() or weight_files(directory))


def tensor_files(directory: Path) -> dict[str, Path]:
    """Name -> file of every tensor. Raises ConfigError for an unreadable file and an index that does not hold."""
    index, single = directory / INDEX, directory / "model.safetensors"
    found = _indexed(index, single) if index.is_file() else _united([single] if single.is_file() else weight_files(directory))
    for name, file in found.items():
        if _QUANTIZED.fullmatch(name):
            raise ConfigError(f"{file}: {name} is part of a quantized weight, wanted unquantized weights")
    return found


def stored_dtype(directory: Path) -> str:
    """The type that holds every weight as it is stored: theirs if they share one, else float32 (which rounds float64 only)."""
    kinds: set[str] = set()
    files = {name: file for name, file in tensor_files(directory).items() if not name.endswith(DERIVED)}
    for file in set(files.values()):
        with opened(file) as handle:
            kinds |= {handle.get_slice(name).get_dtype() for name, at in files.items() if at == file}
    return {"BF16": "bfloat16", "F16": "float16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def check_layers(directory: Path, num_layers: int) -> None:
    """Raise ConfigError naming a tensor that some layers have and others lack. What all lack is found when loading."""
    found: dict[str, set[int]] = {}
    for name in tensor_files(directory):
        if (match := _OF_LAYER.fullmatch(name)) and not name.endswith(DERIVED):
            found.setdefault(match[2], set()).add(int(match[1]))
    missing = []
    for suffix, layers in sorted(found.items()):
        missing += [f"model.layers.{layer}.{suffix}" for layer in range(num_layers) if layer not in layers]
    if missing:
        raise ConfigError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}")


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The open file; raises ConfigError when it is none."""
    try:
        handle = safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not readable as safetensors: {why(file, error)}") from error
    with handle:
        yield handle


def _indexed(index: Path, single: Path) -> dict[str, Path]:
    """As the index says, when the files do not say otherwise."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: weight_map is {type(weight_map).__name__}, wanted an object")
    found = {name: index.parent / _beside(index, file) for name, file in weight_map.items()}
    held = {file: _names(file) for file in sorted(set(found.values()))}
    for name, file in found.items():
        if name not in held[file]:
            raise ConfigError(f"{file}: no tensor {name}, which {index.name} says is there")
    for file, names in held.items():
        for name in sorted(names):
            if found.get(name, file) != file:
                raise _twice(name, file, found[name])
    if single.is_file() and single not in held:
        raise ConfigError(f"{single} is there, too, and {index.name} does not name it; remove one of them")
    return found


def _united(files: list[Path]) -> dict[str, Path]:
    """What all of them hold."""
    found: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            if name in found:
                raise _twice(name, file, found[name])
            found[name] = file
    return found


def _names(file: Path) -> frozenset[str]:
    with opened(file) as handle:
        return frozenset(handle.keys())


def _beside(index: Path, file: object) -> str:
    if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
        raise ConfigError(f"{index}: weight_map names {file!r}, wanted the name of a file beside it")
    return file


def _twice(name: str, file: Path, other: Path) -> ConfigError:
    return ConfigError(f"{file}: tensor {name} is in {other.name} too; keep one")
