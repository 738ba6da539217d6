"""A small real model on the real kernels, and a driver that writes plans by hand."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.core.config import (
    CacheConfig,
    Config,
    LayerLoop,
    LocalPrefill,
    ModelConfig,
    Numerics,
    SchedulerConfig,
    TransferConfig,
)
from jdisagg.core.requests import Role, SamplingParams
from jdisagg.engine.build import make_runner
from jdisagg.engine.runner import ModelRunner
from jdisagg.models.init import random_params
from jdisagg.models.load import LoadedModel
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from jdisagg.sched.plan import Admit, PageAppend, Plan, PrefillChunk, Sampled, StepResult
from jdisagg.sched.stops import stop_ids

VOCAB = 97
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def load(dtype: str = "float32", tp: int = 1, kv_dtype: str | None = None, **config):
    """(model, mesh) with random weights large enough that tokens vary; `config` replaces keys of CONFIG."""
    spec = ModelSpec.from_config(CONFIG | config)
    mesh = make_mesh(jax.devices("cpu"), tp)
    params = random_params(spec, mesh, dtype, seed=3)
    params = jax.tree.map(lambda x: x * np.asarray(5.0, x.dtype) if x.ndim > 1 else x, params)
    loaded = LoadedModel(
        spec=spec,
        params=params,
        layer_loop=LayerLoop.UNROLLED,
        fingerprint="test",
        eos_token_ids=(0,),
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
    )
    return loaded, mesh


def make(
    *,
    numerics: Numerics = Numerics.FAST,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    tp: int = 1,
    page_size: int = 4,
    num_pages: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int | None = 64,
    role: Role = Role.UNIFIED,
    chunk_tokens: int = 8,
) -> ModelRunner:
    """A runner of the small model."""
    config = Config(
        model=ModelConfig(numerics=numerics, max_model_len=max_model_len),
        cache=CacheConfig(page_size=page_size, num_pages=num_pages),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        transfer=TransferConfig(transfer_chunk_tokens=chunk_tokens, local_prefill=LocalPrefill.ON_FAILURE),
    )
    return make_runner(*load(dtype, tp, kv_dtype), config, role)


@dataclass
class Driver:
    """Builds plans by hand and keeps what came back; one page table per slot, all pages given at admission."""

    runner: ModelRunner
    step_id: int = 0

    def run(self, **parts) -> StepResult:
        """Dispatch one plan and collect it."""
        return self.runner.collect(self.dispatch(**parts))

    def dispatch(self, **parts):
        """Dispatch one plan."""
        self.step_id += 1
        return self.runner.dispatch(Plan(step_id=self.step_id, **parts))

    def generate(self, slot, pages, prompt, sampling=GREEDY, *, chunks=None, num=8) -> list[Sampled]:
        """Prefill `prompt` in chunks of the given lengths, then decode until `num` tokens are there, step by step."""
        parts = chunk_up(slot, prompt, chunks or [len(prompt)])
        results = [self.run(admit=(admit(slot, pages, prompt, sampling),), prefill=parts[:1])]
        results += [self.run(prefill=(part,)) for part in parts[1:]]
        results += [self.run(decode=(slot,)) for _ in range(num - 1)]
        self.run(evict=(slot,))
        return [sampled for result in results for sampled in result.sampled]


def chunk_up(slot, prompt, lengths, *, num_top=None):
    """PrefillChunks of the given lengths; `num_top` asks for prompt log-probabilities."""
    chunks, start = [], 0
    for length in lengths:
        ids = tuple(prompt[start : start + length])
        targets = None if num_top is None else tuple(prompt[start + 1 : start + length + 1])
        samples = start + length == len(prompt)
        chunks.append(
            PrefillChunk(
                slot=slot,
                request_id=f"r{slot}",
                start=start,
                token_ids=ids,
                samples=samples,
                targets=targets,
                num_top=num_top or 0,
            )
        )
        start += length
    return tuple(chunks)


def admit(slot, pages, prompt, sampling=GREEDY, *, generated=(), decodes=False, choice=0, eos=(0,)):
    """An admission with a whole page table."""
    return Admit(
        slot=slot,
        request_id=f"r{slot}",
        choice=choice,
        sampling=sampling,
        stop_ids=tuple(sorted(stop_ids(sampling, eos))),
        page_table=(tuple(pages),),
        prompt_token_ids=tuple(prompt),
        generated_token_ids=tuple(generated),
        decodes=decodes,
    )


def append(slot, index, page):
    """A page append."""
    return PageAppend(slot=slot, index=index, page=page)


def tokens(sampled) -> list[int]:
    """Token ids in order."""
    return [token for one in sampled for token in one.token_ids]


def prompt_of(length, seed=0) -> list[int]:
    """Random token ids without EOS."""
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()
