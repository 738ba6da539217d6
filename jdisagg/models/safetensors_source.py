"""Parameters from safetensors files, with or without an index: every device's part is read on its own, never the whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Declared, build, declarations
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.safetensors_files import DERIVED, opened, tensor_files
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec

_FLOATS = ("F64", "F32", "F16", "BF16")


def load_safetensors(directory: Path, spec: ModelSpec, mesh: Mesh, dtype: str) -> dict[str, Any]:
    """The parameter dict as `dtype`, on its devices. Raises ConfigError naming tensor, file, and what was wanted and got."""
    files = tensor_files(directory)
    _check_names(directory, spec, files)

    def make(_: ParamPath, declared: Declared) -> jax.Array:
        # Opened once per tensor: an open file keeps every page that was read mapped, which doubles the resident size.
        with opened(files[declared.name]) as handle:
            part = handle.get_slice(declared.name)
            _check(files[declared.name], declared, tuple(part.get_shape()), part.get_dtype())

            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                if not declared.transposed:
                    return np.ascontiguousarray(part[index], dtype=np.dtype(dtype))
                return np.ascontiguousarray(part[index[::-1]].T, dtype=np.dtype(dtype))

            return jax.make_array_from_callback(declared.shape, param_sharding(mesh, spec, declared), read)

    return build(spec, make)


def _check_names(directory: Path, spec: ModelSpec, files: Mapping[str, Path]) -> None:
    wanted = {declared.name for declared in declarations(spec).values()}
    if missing := sorted(wanted - files.keys()):
        raise ConfigError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}", field="model")
    extra = sorted(name for name in files.keys() - wanted if not name.endswith(DERIVED))
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
