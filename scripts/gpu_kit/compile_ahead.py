"""The steps of an engine compiled beside each other, into the cache of compiled programs.

A worker compiles one after another, eight of 10 to 13 CPU seconds for Llama 3.2 1B on an H200; so it finds them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import jax

from jdisagg.aot.abstract import AbstractEngine, ModelForm
from jdisagg.core.config import Config
from jdisagg.core.requests import Role
from jdisagg.engine.executables import MODEL_STEPS
from jdisagg.engine.functions import jit_functions
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.sizing import size_engine
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.form import choose_dtypes, choose_layer_loop
from jdisagg.models.resolve import read_model_config
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec

THREADS = 8


def compile_ahead(config: Config, timeout_s: float) -> int:
    """Prefill and decode of a unified engine whose pages are counted in `config`; how many were done in time.

    Nothing is allocated. Raises what a compilation raised.
    """
    engine = _engine(config)
    steps = [executable for executable in engine.executables() if executable.name in MODEL_STEPS]
    model = DecoderModel(engine.form.spec, choose_ops(engine.layout, engine.mesh), engine.form.layer_loop)
    functions = jit_functions(model, engine.layout, engine.mesh, hidden_rows=engine.sizes.device.prefill_tokens)
    held = (engine.params, (engine.kv,), engine.state)  # and host arrays, as `Device` has them: the cache goes by the text
    lowered = [functions[step.name].lower(*held, *step.arguments) for step in steps]
    threads = ThreadPoolExecutor(THREADS)
    done, _ = wait([threads.submit(each.compile) for each in lowered], timeout_s)
    threads.shutdown(wait=False, cancel_futures=True)
    return len([future.result() for future in done])


def _engine(config: Config) -> AbstractEngine:
    mesh = make_mesh(jax.devices()[:1], 1)
    spec = ModelSpec.from_config(read_model_config(config.model.model))
    dtype, kv_dtype = choose_dtypes(config.model, mesh.devices.flat[0].platform)
    form = ModelForm(spec=spec, dtype=dtype, kv_dtype=kv_dtype, layer_loop=choose_layer_loop(config.model))
    sizes = size_engine(spec, form.layout(mesh, config.cache.page_size), config, Role.UNIFIED, lambda: None)
    return AbstractEngine(form=form, mesh=mesh, page_size=config.cache.page_size, sizes=sizes)
