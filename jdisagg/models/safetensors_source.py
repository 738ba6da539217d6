"""Parameters from safetensors files, with or without an index: read slab by slab, each into the parts of its devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Declared, build, declarations
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.host_parts import HostParts, slabs
from jdisagg.models.safetensors_files import DERIVED, opened, tensor_files
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec

SLAB_ELEMENTS = 2**20  # read unit: 2 or 4 MiB
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_safetensors(directory: Path, spec: ModelSpec, mesh: Mesh, dtype: str) -> dict[str, Any]:
    """The parameter dict as `dtype`, on its devices. Raises ConfigError naming tensor, file, and what was wanted and got."""
    files = tensor_files(directory)
    states = {file: _state(file) for file in sorted(set(files.values()))}
    _check_names(directory, spec, files)
    if spec.tied and OUTPUT in files:
        _check_tied(files)

    def make(_: ParamPath, declared: Declared) -> jax.Array:
        file, stored = files[declared.name], _stored_shape(declared)
        with opened(file) as handle:
            part = handle.get_slice(declared.name)
            _check(file, declared, tuple(part.get_shape()), part.get_dtype())
        parts = HostParts(declared.shape, param_sharding(mesh, spec, declared), dtype)
        rows = max(1, SLAB_ELEMENTS // math.prod(stored[1:]))
        for slab in slabs(stored, (rows, *stored[1:])):
            with opened(file) as handle:  # per slab: an open file keeps every page that was read mapped, and so resident
                values = handle.get_slice(declared.name)[slab]
            if declared.transposed:
                parts.fill(slab[::-1], values.T)
            else:
                parts.fill(slab, values)
        return parts.placed()

    params = build(spec, make)
    for file, state in states.items():
        if _state(file) != state:
            raise ConfigError(f"{file}: was changed while it was read; start again", field="model")
    return params


def _state(file: Path) -> tuple[int, int, int] | None:
    """What is another one once a file was written or exchanged; None when it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_names(directory: Path, spec: ModelSpec, files: Mapping[str, Path]) -> None:
    wanted = {declared.name for declared in declarations(spec).values()}
    if missing := sorted(wanted - files.keys()):
        raise ConfigError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}", field="model")
    extra = sorted(name for name in files.keys() - wanted if not name.endswith(DERIVED))
    if spec.tied:
        extra = [name for name in extra if name != OUTPUT]
    if extra:
        raise ConfigError(
            f"{files[extra[0]]}: {len(extra)} tensors that {spec.architecture} does not have, first {extra[0]}; "
            "is config.json of the same checkpoint?",
            field="model",
        )


def _check_tied(files: Mapping[str, Path]) -> None:
    """A copy of the embedding does no harm; another matrix is what the model was trained with, whatever config.json says."""
    with opened(files[EMBEDDING]) as handle:
        shape = tuple(handle.get_slice(EMBEDDING).get_shape())
    with opened(files[OUTPUT]) as handle:
        same = tuple(handle.get_slice(OUTPUT).get_shape()) == shape
    rows = max(1, SLAB_ELEMENTS // math.prod(shape[1:]))
    for slab in slabs(shape, (rows, *shape[1:])) if same else ():
        with opened(files[EMBEDDING]) as embedding, opened(files[OUTPUT]) as output:
            same = np.array_equal(embedding.get_slice(EMBEDDING)[slab], output.get_slice(OUTPUT)[slab])
        if not same:
            break
    if not same:
        raise ConfigError(
            f"{files[OUTPUT]}: {OUTPUT} is not the embedding, which by tie_word_embeddings in config.json it is; "
            "write false there, or remove the tensor",
            field="model",
        )


def _stored_shape(declared: Declared) -> tuple[int, ...]:
    return declared.shape[::-1] if declared.transposed else declared.shape


def _check(file: Path, declared: Declared, shape: tuple[int, ...], dtype: str) -> None:
    wanted = _stored_shape(declared)
    if shape != wanted:
        raise ConfigError(
            f"{file}: tensor {declared.name} is {list(shape)}, wanted {list(wanted)} by config.json", field="model"
        )
    if dtype not in _FLOATS:
        raise ConfigError(f"{file}: tensor {declared.name} is {dtype}, wanted one of {', '.join(_FLOATS)}", field="model")
