"""One way of making a decode step: the engine's device side with a model, sequences in its slots, and a stopwatch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum

import jax
import numpy as np

from jdisagg.core.config import LayerLoop
from jdisagg.core.requests import SamplingParams
from jdisagg.engine.device import Device, DeviceShape
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.updates import pack_admissions
from jdisagg.kv.layout import choose_layout
from jdisagg.models.declare import build
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.init import random_params
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from jdisagg.models.stacking import build_stacked
from jdisagg.sched.plan import Admit
from step_bench.plain import PlainOps, ScannedModel

PAGE_SIZE = 16
WARM_STEPS = 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


class Form(StrEnum):
    """How the step is written."""

    ENGINE = "engine"  # as a worker runs it
    CARRIED = "carried"  # `lax.scan` over stacked layers, plain attention; the whole cache in the loop's carry, in place
    SCANNED = "scanned"  # the same as it is mostly written: each layer's cache goes into the scan and comes out of it


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step cannot avoid: bytes to read, and floating-point operations."""

    num_bytes: int
    flops: int


class Subject:
    """A step of one form."""

    def __init__(self, form: Form, dtype: str, batch: int, context: int, steps: int) -> None:
        """Fill `batch` slots with sequences of `context` tokens; there is room for `steps` more."""
        spec, mesh = ModelSpec.from_config(CONFIG), make_mesh(jax.devices(), 1)
        params = random_params(spec, mesh, dtype, build if form is Form.ENGINE else build_stacked, seed=0)
        self.param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self.param_count = sum(leaf.size for leaf in jax.tree.leaves(params))
        layout = choose_layout(spec.kv_spec(dtype), mesh, PAGE_SIZE)
        if form is Form.ENGINE:
            model = DecoderModel(spec, choose_ops(layout, mesh), LayerLoop.UNROLLED)
        else:
            layout = replace(layout, heads_major=False, as_bits=False)
            model = (ScannedModel if form is Form.SCANNED else DecoderModel)(spec, PlainOps(), LayerLoop.SCAN)
        width = -(-(context + steps) // PAGE_SIZE)
        sizes = DeviceShape(
            max_num_seqs=batch, pages_per_seq=width, vocab_size=spec.vocab_size, chunk_tokens=256, prefill_tokens=0
        )
        self._spec, self._context = spec, context
        self._kv_token_bytes = layout.bytes_per_page // PAGE_SIZE
        self._device = Device(model, params, layout, mesh, sizes, num_pages=1 + batch * width)
        self._slots = np.arange(batch, dtype=np.int32)
        self._fill(width)

    def _fill(self, width: int) -> None:
        rng = np.random.default_rng(0)
        pages = rng.permutation(len(self._slots) * width) + 1
        admits = []
        for slot in self._slots.tolist():
            table = tuple(int(page) for page in pages[slot * width : (slot + 1) * width])
            prompt = tuple(int(token) for token in rng.integers(3, self._spec.vocab_size, self._context))
            admits.append(
                Admit(
                    slot=slot,
                    request_id=f"r{slot}",
                    choice=0,
                    sampling=SamplingParams(temperature=0.0),
                    stop_ids=(),
                    prompt_token_ids=prompt,
                    generated_token_ids=(),
                    decodes=True,
                    page_table=(table,),
                )
            )
        shape = self._device.shape
        for rows in pack_admissions(admits, num_slots=len(admits), width=width, vocab_size=shape.vocab_size):
            self._device.update("admit", rows)

    def time_steps(self, steps: int) -> float:
        """Seconds per step, the steps waiting for one another on the device only."""
        began_s, out = time.perf_counter(), None
        for _ in range(steps):
            out = self._device.decode(self._slots)
        jax.block_until_ready(out)
        return (time.perf_counter() - began_s) / steps

    @property
    def work(self) -> Work:
        """Of a step: every weight and every visible key and value is read, every product is made, once."""
        seen = len(self._slots) * self._context
        heads = self._spec.attention.num_heads * self._spec.attention.head_dim
        return Work(
            num_bytes=self.param_bytes + seen * self._kv_token_bytes,
            flops=2 * len(self._slots) * self.param_count + 4 * seen * heads * self._spec.num_layers,
        )
