"""Parameters from safetensors files, with or without an index: every device's part is read on its own, never the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Declared, build, declarations
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.resolve import read_object
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_DERIVED = (".rotary_emb.inv_freq",)  # buffers in old checkpoints that follow from config.json


def has_safetensors(directory: Path) -> bool:
    """True when `load_safetensors` has something to read."""
    return bool((directory / INDEX).is_file() or any(directory.glob("*.safetensors")))


def load_safetensors(directory: Path, spec: ModelSpec, mesh: Mesh, dtype: str) -> dict[str, Any]:
    """The parameter dict as `dtype`, on its devices. Raises ConfigError naming tensor, file, and what was wanted and got."""
    files = _files(directory)
    _check_names(directory, spec, files)

    def make(_: ParamPath, declared: Declared) -> jax.Array:
        # Opened once per tensor: an open file keeps every page that was read mapped, which doubles the resident size.
        with _opened(files[declared.name]) as handle:
            part = handle.get_slice(declared.name)
            _check(files[declared.name], declared, tuple(part.get_shape()), part.get_dtype())

            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                if not declared.transposed:
                    return np.ascontiguousarray(part[index], dtype=np.dtype(dtype))
                return np.ascontiguousarray(part[index[::-1]].T, dtype=np.dtype(dtype))

            return jax.make_array_from_callback(declared.shape, param_sharding(mesh, spec, declared), read)

    return build(spec, make)


def _files(directory: Path) -> dict[str, Path]:
    """Name -> file of every tensor."""
    found: dict[str, Path] = {}
    index = directory / INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: weight_map is {type(weight_map).__name__}, wanted an object", field="model")
        found = {name: directory / Path(str(file)).name for name, file in weight_map.items()}
        held = {file: _names(file) for file in sorted(set(found.values()))}
        for name, file in found.items():
            if name not in held[file]:
                raise ConfigError(f"{file}: no tensor {name}, which {index.name} says is there", field="model")
        return found
    single = directory / "model.safetensors"
    for file in [single] if single.is_file() else sorted(directory.glob("*.safetensors")):
        for name in _names(file):
            if name in found:
                raise ConfigError(f"{file}: tensor {name} is in {found[name].name} too; keep one", field="model")
            found[name] = file
    return found


def _names(file: Path) -> frozenset[str]:
    with _opened(file) as handle:
        return frozenset(handle.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not readable as safetensors: {error}; copy the file again", field="model") from error
    with handle:
        yield handle


def _check_names(directory: Path, spec: ModelSpec, files: Mapping[str, Path]) -> None:
    wanted = {declared.name for declared in declarations(spec).values()}
    if missing := sorted(wanted - files.keys()):
        raise ConfigError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}", field="model")
    extra = sorted(name for name in files.keys() - wanted if not name.endswith(_DERIVED))
    if spec.tied:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise ConfigError(
            f"{files[extra[0]]}: {len(extra)} tensors that {spec.architecture} does not have, first {extra[0]}; "
            "is config.json of the same checkpoint?",
            field="model",
        )


def _check(file: Path, declared: Declared, shape: tuple[int, ...], dtype: str) -> None:
    wanted = declared.shape[::-1] if declared.transposed else declared.shape
    if shape != wanted:
        raise ConfigError(
            f"{file}: tensor {declared.name} is {list(shape)}, wanted {list(wanted)} by config.json", field="model"
        )
    if dtype not in _FLOATS:
        raise ConfigError(f"{file}: tensor {declared.name} is {dtype}, wanted one of {', '.join(_FLOATS)}", field="model")
