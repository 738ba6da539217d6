"""Parameters in an Orbax checkpoint: a flat dict by checkpoint name, in memory orientation, under DIRECTORY/orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Declared, build, declarations
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec

SUBDIRECTORY = "orbax"


def has_orbax(directory: Path) -> bool:
    """True when `load_orbax` has something to read."""
    return (directory / SUBDIRECTORY).is_dir()


def save_orbax(directory: Path, spec: ModelSpec, params: dict[str, Any]) -> None:
    """Write unstacked parameters to DIRECTORY/orbax, which must not exist."""
    flat: dict[str, jax.Array] = {}
    for path, declared in declarations(spec).items():
        leaf: Any = params
        for part in path:
            leaf = leaf[part]
        flat[declared.name] = leaf
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / SUBDIRECTORY).resolve(), flat)


def load_orbax(directory: Path, spec: ModelSpec, mesh: Mesh, dtype: str) -> dict[str, Any]:
    """The parameter dict as `dtype`, on its devices. Raises ConfigError naming tensor, directory, wanted and got."""
    path = (directory / SUBDIRECTORY).resolve()
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = _stored(checkpointer, path)
        _check(path, spec, stored)
        wanted = {
            declared.name: ocp.ArrayRestoreArgs(
                sharding=param_sharding(mesh, spec, declared), dtype=np.dtype(dtype), global_shape=declared.shape
            )
            for declared in declarations(spec).values()
        }
        restore = ocp.args.PyTreeRestore(item={name: stored[name] for name in wanted}, restore_args=wanted)
        try:
            flat = checkpointer.restore(path, args=restore)
        except Exception as error:  # Orbax raises bare Exception for unreadable data
            first = str(error).partition("\n")[0]
            raise ConfigError(f"{path}: damaged Orbax checkpoint: {first}; convert again", field="model") from error

    def make(_: ParamPath, declared: Declared) -> jax.Array:
        return flat[declared.name]

    return build(spec, make)


def _stored(checkpointer: ocp.PyTreeCheckpointer, path: Path) -> dict[str, Any]:
    """Shape and type of every stored tensor by name."""
    try:
        metadata = checkpointer.metadata(path).item_metadata
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{path}: not readable as an Orbax checkpoint: {error}; convert again", field="model") from error
    if metadata is None or not isinstance(metadata.tree, dict):
        raise ConfigError(f"{path}: not readable as an Orbax checkpoint: no tensors listed; convert again", field="model")
    return metadata.tree


def _check(path: Path, spec: ModelSpec, stored: dict[str, Any]) -> None:
    wanted = {declared.name: declared for declared in declarations(spec).values()}
    for name in sorted(wanted.keys() ^ stored.keys()):
        problem = "is missing" if name in wanted else f"is not one of {spec.architecture}"
        raise ConfigError(f"{path}: tensor {name} {problem}; is config.json of the same checkpoint?", field="model")
    for name, declared in wanted.items():
        if tuple(stored[name].shape) != declared.shape:
            got, want = list(stored[name].shape), list(declared.shape)
            raise ConfigError(f"{path}: tensor {name} is {got}, wanted {want} by config.json", field="model")
