"""A model on its devices, from a directory: safetensors, Orbax, or random values (`--load-format dummy`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jdisagg.core.config import LayerLoop, ModelConfig, Numerics
from jdisagg.core.fingerprint import Parts
from jdisagg.kv.memory import wants_memory
from jdisagg.models.declare import Build, Declared, Make, build
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.fingerprint import WeightSums, fingerprint
from jdisagg.models.form import choose_dtypes, choose_layer_loop
from jdisagg.models.formats import choose_format
from jdisagg.models.init import random_params
from jdisagg.models.limits import check_model
from jdisagg.models.orbax_source import load_orbax
from jdisagg.models.resolve import eos_token_ids, read_config, resolve_model
from jdisagg.models.safetensors_source import load_safetensors
from jdisagg.models.spec import ModelSpec
from jdisagg.models.stacking import build_stacked


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What steps, hand-shakes and edges need of a model."""

    spec: ModelSpec
    params: dict[str, Any]  # see `declare.build`; layers stacked when `layer_loop` is SCAN
    layer_loop: LayerLoop  # UNROLLED or SCAN
    fingerprint: str  # equal on two workers that may pair
    fingerprint_parts: Parts = ()
    eos_token_ids: tuple[int, ...]
    dtype: str  # of parameters and activations
    kv_dtype: str  # of the KV cache


def load_model(config: ModelConfig, mesh: Mesh, *, seed: int) -> LoadedModel:
    """Put the model on `mesh` (see `make_mesh`). `seed` matters for random values only.

    No process holds an unsharded copy, no device more than the weights and one parameter of a layer. Raises ConfigError
    naming flag, file, tensor or key, what was wanted and got.
    """
    directory = resolve_model(config.model, weights=config.load_format != "dummy")
    spec = ModelSpec.from_config(read_config(directory))
    check_model(config, spec, mesh.shape["tp"])
    dtype, kv_dtype = choose_dtypes(config, mesh.devices.flat[0].platform)
    kind, layer_loop, sums = choose_format(config.load_format, directory), choose_layer_loop(config), WeightSums()
    assemble = _summing(sums, build_stacked if layer_loop is LayerLoop.SCAN else build)
    with wants_memory(
        f"--model: the weights of {config.model} in {dtype} are more than is free on {mesh.devices.size} device(s); use more "
        "of them (--tensor-parallel-size), or see who else has their memory"
    ):
        params = _load(kind, directory, spec, mesh, assemble, dtype=dtype, seed=seed)
        digest, parts = fingerprint(spec, sums, numerics=_numerics(config.numerics, layer_loop))
    return LoadedModel(
        spec=spec,
        params=params,
        layer_loop=layer_loop,
        fingerprint=digest,
        fingerprint_parts=parts,
        eos_token_ids=eos_token_ids(directory),
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def _load(kind: str, directory: Path, spec: ModelSpec, mesh: Mesh, assemble: Build, *, dtype: str, seed: int) -> dict[str, Any]:
    match kind:
        case "dummy":
            return random_params(spec, mesh, dtype, assemble, seed=seed)
        case "safetensors":
            return load_safetensors(directory, spec, mesh, dtype, assemble)
        case _:
            return load_orbax(directory, spec, mesh, dtype, assemble)


def _numerics(numerics: Numerics, layer_loop: LayerLoop) -> str:
    """What bits depend on where they matter: a compiler rounds in other places inside a loop over the layers."""
    is_scanned = numerics is Numerics.EXACT and layer_loop is LayerLoop.SCAN
    return f"{numerics.value}, layers in a scan" if is_scanned else numerics.value


def _summing(sums: WeightSums, assemble: Build) -> Build:
    """`assemble` that adds every parameter to `sums` when it is made."""

    def assembled(spec: ModelSpec, make: Make) -> dict[str, Any]:
        def summed(path: ParamPath, declared: Declared) -> Any:
            leaf = make(path, declared)
            sums.add(path, declared, leaf)
            return leaf

        return assemble(spec, summed)

    return assembled
