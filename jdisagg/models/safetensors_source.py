"""Parameters from safetensors files, with or without an index: read slab by slab, each into the parts of its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Build, Declared, build, declarations
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.host_parts import HostParts, Slab, slabs
from jdisagg.models.safetensors_files import DERIVED, opened, tensor_files
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec

SLAB_ELEMENTS = 2**20  # read unit: 2 or 4 MiB
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_safetensors(directory: Path, spec: ModelSpec, mesh: Mesh, dtype: str, assemble: Build = build) -> dict[str, Any]:
    """What `assemble` makes, as `dtype`, on its devices. Raises ConfigError naming tensor, file, what was wanted and got."""
    files = tensor_files(directory)
    states = {file: _state(file) for file in sorted(set(files.values()))}
    _check_names(directory, spec, files)
    for declared in declarations(spec).values():  # before anything is read or compiled
        with opened(files[declared.name]) as handle:
            _check(files[declared.name], declared.name, handle.get_slice(declared.name), _stored(declared))
    if spec.tied and OUTPUT in files and not _repeats_embedding(files):
        raise ConfigError(
            f"{files[OUTPUT]}: {OUTPUT} is not the embedding, which by tie_word_embeddings in config.json it is; "
            "write false there, or remove the tensor"
        )

    def make(_: ParamPath, declared: Declared) -> jax.Array:
        file, stored = files[declared.name], _stored(declared)
        parts = HostParts(declared.shape, param_sharding(mesh, spec, declared), dtype)
        for slab in _row_slabs(stored):
            with opened(file) as handle:  # per slab: an open file keeps every page that was read mapped, and so resident
                values = handle.get_slice(declared.name)[slab]
            if declared.transposed:
                parts.fill(slab[::-1], values.T)
            else:
                parts.fill(slab, values)
        return parts.placed()

    params = assemble(spec, make)
    for file, state in states.items():
        if _state(file) != state:
            raise ConfigError(f"{file}: was changed while it was read; start again")
    return params


def _stored(declared: Declared) -> tuple[int, ...]:
    return declared.shape[::-1] if declared.transposed else declared.shape


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
        raise ConfigError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}")
    extra = sorted(name for name in files.keys() - wanted if not name.endswith(DERIVED))
    if spec.tied:
        extra = [name for name in extra if name != OUTPUT]
    if extra:
        raise ConfigError(
            f"{files[extra[0]]}: {len(extra)} tensors that {spec.architecture} does not have, first {extra[0]}; "
            "is config.json of the same checkpoint?"
        )


def _repeats_embedding(files: Mapping[str, Path]) -> bool:
    """A copy of the embedding does no harm; another matrix is what the model was trained with, whatever config.json says."""
    with opened(files[EMBEDDING]) as embedding, opened(files[OUTPUT]) as output:
        shape = tuple(embedding.get_slice(EMBEDDING).get_shape())
        if tuple(output.get_slice(OUTPUT).get_shape()) != shape:
            return False
    for slab in _row_slabs(shape):
        with opened(files[EMBEDDING]) as embedding, opened(files[OUTPUT]) as output:
            if not np.array_equal(embedding.get_slice(EMBEDDING)[slab], output.get_slice(OUTPUT)[slab]):
                return False
    return True


def _row_slabs(shape: tuple[int, ...]) -> Iterator[Slab]:
    """Whole rows, as many as have SLAB_ELEMENTS, or one."""
    return slabs(shape, (max(1, SLAB_ELEMENTS // math.prod(shape[1:])), *shape[1:]))


def _check(file: Path, name: str, tensor: Any, wanted: tuple[int, ...]) -> None:
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != wanted:
        raise ConfigError(f"{file}: tensor {name} is {list(shape)}, wanted {list(wanted)} by config.json")
    if dtype not in _FLOATS:
        raise ConfigError(f"{file}: tensor {name} is {dtype}, wanted one of {', '.join(_FLOATS)}")
