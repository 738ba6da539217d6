"""Parameters in an Orbax checkpoint: a flat dict by checkpoint name, in memory orientation, under DIRECTORY/orbax.

Orbax writes it and says what it holds; the bytes are read through tensorstore, one stored chunk of one parameter at a time,
once for all devices. Orbax's own restore keeps every host copy until the end: 1.5-2 times the checkpoint in memory against
1.1, and 3 times as long for 400 MB.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Build, Declared, build, declarations, named_leaves
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.host_parts import HostParts, slabs
from jdisagg.models.resolve import ORBAX
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec

CHUNK_BYTES = 4 * 2**20  # unit of writing and reading: what a load holds beyond the weights is a few of them
_CONTEXT = {  # nothing is read twice, so nothing is cached; few threads, each of which keeps what it once allocated
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#directory": {"total_bytes_limit": 2**20},
    "file_io_concurrency": {"limit": 1},
    "data_copy_concurrency": {"limit": 1},
}


def save_orbax(directory: Path, spec: ModelSpec, params: dict[str, Any]) -> None:
    """Write unstacked parameters to DIRECTORY/orbax, which must not exist. Uncompressed: weights shrink by 8 % only."""
    flat: dict[str, jax.Array] = {declared.name: leaf for _, declared, leaf in named_leaves(spec, params)}
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in flat}
    with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer, _without_patterns(directory.resolve()) as named:
        checkpointer.save(named / ORBAX, flat, save_args=save_args)


def load_orbax(directory: Path, spec: ModelSpec, mesh: Mesh, dtype: str, assemble: Build = build) -> dict[str, Any]:
    """What `assemble` makes, as `dtype`, on its devices. Raises ConfigError naming tensor, directory, wanted and got."""
    path = (directory / ORBAX).resolve()
    _check(path, spec, _stored(path))
    context = ts.Context(_CONTEXT)

    def make(_: ParamPath, declared: Declared) -> jax.Array:
        parts = HostParts(declared.shape, param_sharding(mesh, spec, declared), dtype)
        try:
            tensor = _open(path, declared.name, context)
            chunk: Any = tensor.chunk_layout.read_chunk.shape  # of zarr: one number per dimension
            for slab in slabs(declared.shape, chunk):
                parts.fill(slab, tensor[slab].read().result())
        except (ValueError, OSError) as error:
            first = str(error).partition("\n")[0]
            message = f"{path}: tensor {declared.name} is not readable: {first}; convert again"
            raise ConfigError(message) from error
        return parts.placed()

    return assemble(spec, make)


@contextmanager
def _without_patterns(directory: Path) -> Iterator[Path]:
    """`directory` by a name without [, * or ?: Orbax looks there with a glob pattern for what it is to join at the end, and
    leaves out what it does not find."""
    if glob.escape(str(directory)) == str(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory() as scratch:
        link = Path(scratch) / "model"
        link.symlink_to(directory)
        yield link


def _open(path: Path, name: str, context: ts.Context) -> ts.TensorStore:
    store = _database(path) | {"path": f"{name}/", "cache_pool": "cache_pool#directory"}
    return ts.open({"driver": "zarr", "kvstore": store}, context=context, open=True, read=True).result()


def _database(path: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}  # no URL: a name may hold %, # or ?


def _stored(path: Path) -> dict[str, Any]:
    """Shape and type of every stored tensor by name. The keys are listed first: where those cannot be read Orbax fails, too,
    but leaves behind reads whose tracebacks bury the error."""
    try:
        ts.KvStore.open(_database(path)).result().list().result()
    except (ValueError, OSError) as error:
        raise _unreadable(path, str(error).partition("\n")[0]) from error
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(path).item_metadata
        except (TypeError, ValueError, OSError) as error:
            raise _unreadable(path, str(error)) from error
        except (AttributeError, LookupError) as error:  # JSON, but not what Orbax writes
            raise _unreadable(path, "its _METADATA lists no tensors") from error
    if metadata is None or not isinstance(metadata.tree, dict):
        raise _unreadable(path, "no tensors listed")
    return metadata.tree


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: not readable as an Orbax checkpoint: {why}; convert again")


def _check(path: Path, spec: ModelSpec, stored: dict[str, Any]) -> None:
    wanted = {declared.name: declared for declared in declarations(spec).values()}
    for name in sorted(wanted.keys() ^ stored.keys()):
        problem = "is missing" if name in wanted else f"is not one of {spec.architecture}"
        raise ConfigError(f"{path}: tensor {name} {problem}; is config.json of the same checkpoint?")
    for name, declared in wanted.items():
        if tuple(stored[name].shape) != declared.shape:
            got, want = list(stored[name].shape), list(declared.shape)
            raise ConfigError(f"{path}: tensor {name} is {got}, wanted {want} by config.json")
