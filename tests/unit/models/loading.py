"""A model loaded over some devices, written again as Orbax does, and compared weight by weight."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdisagg.core.config import ModelConfig
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.orbax_source import save_orbax
from jdisagg.models.sharding import make_mesh


def load(directory: Path, *, tp: int = 1, seed: int = 0, **config: Any) -> LoadedModel:
    config = {"tensor_parallel_size": tp, **config}
    return load_model(ModelConfig(model=str(directory), **config), make_mesh(jax.devices(), tp), seed=seed)


def as_orbax(source: Path, directory: Path) -> Path:
    model = load(source)
    directory.mkdir()
    shutil.copyfile(source / "config.json", directory / "config.json")
    save_orbax(directory, model.spec, model.params)
    return directory


def equal(a: LoadedModel, b: LoadedModel) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a.params, b.params)))
