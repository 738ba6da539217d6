from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Build, Declared, Make, build
from jdisagg.models.declare import Path as ParamPath
from jdisagg.models.safetensors_source import load_safetensors
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec


def halfway(act: Callable[[], None]) -> Build:
    """What has `act` called when half of the parameters were read."""

    def assemble(spec: ModelSpec, make: Make) -> dict[str, Any]:
        count = 0

        def counting(path: ParamPath, declared: Declared) -> Any:
            nonlocal count
            count += 1
            if count == 12:
                act()
            return make(path, declared)

        return build(spec, counting)

    return assemble


def test_weights_that_are_exchanged_while_they_are_read_are_refused(
    model_directory: Path, tensors: dict[str, np.ndarray], spec: ModelSpec
) -> None:
    """The first half of the old model and the second of the new one would be served, and nothing would say so."""
    other = {name: value + 1 for name, value in tensors.items()}

    def replace() -> None:
        save_file(other, model_directory / "new")
        os.replace(model_directory / "new", model_directory / "model.safetensors")

    with pytest.raises(ConfigError, match=r"model\.safetensors: was changed while it was read; start again"):
        load_safetensors(model_directory, spec, make_mesh(jax.devices(), 1), "float32", halfway(replace))


def test_weights_that_vanish_while_they_are_read_are_named(model_directory: Path, spec: ModelSpec) -> None:
    vanish = halfway((model_directory / "model.safetensors").unlink)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not readable as safetensors: No such file"):
        load_safetensors(model_directory, spec, make_mesh(jax.devices(), 1), "float32", vanish)


def test_loaded_weights_do_not_depend_on_their_file(
    model_directory: Path, tensors: dict[str, np.ndarray], spec: ModelSpec
) -> None:
    params = load_safetensors(model_directory, spec, make_mesh(jax.devices(), 2), "float32")
    file = model_directory / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    np.testing.assert_array_equal(params["norm"]["scale"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(params["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
