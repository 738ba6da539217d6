"""Compiled runners of the small model, alike or not: what engines of these tests are made on."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from functools import cache

import jax
import tokenizers
from jax.sharding import NamedSharding

from jdisagg.core.config import CacheConfig, Config, LocalPrefill, ModelConfig, Numerics, SchedulerConfig, TransferConfig
from jdisagg.core.requests import Role
from jdisagg.engine.build import make_runner
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.warmup import warm_up
from jdisagg.models.load import LoadedModel
from jdisagg.models.sharding import make_mesh
from jdisagg.text.grammar import Grammars, Vocabulary
from tests.unit.engine.support import VOCAB, load

PAGE, MAX_LEN, SLOTS, BUDGET, CHUNK_TOKENS, POOL = 4, 96, 8, 24, 8, 400


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What two workers that pair may differ in."""

    tp: int = 1
    page_size: int = PAGE
    kv_dtype: str = "float32"
    chunk_tokens: int = CHUNK_TOKENS


ONE_DEVICE = Shape()


@cache
def grammars() -> Grammars:
    """Of a tokenizer whose tokens are EOS, 0, and the visible characters, a blank and a line's end."""
    characters = [c for c in map(chr, range(33, 127)) if c in string.printable]
    vocabulary = {token: number for number, token in enumerate(["<eos>", *characters, "Ġ", "Ċ"])}
    assert len(vocabulary) == VOCAB
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<eos>"])
    return Grammars(Vocabulary(tokenizer.to_str(), VOCAB, (0,), ()))


def build_runner(
    numerics: Numerics, role: Role, *, device: int = 0, most_tokens: int = MAX_LEN, shape: Shape = ONE_DEVICE
) -> tuple[LoadedModel, ModelRunner]:
    """The small model on devices from `device` on, everything compiled for steps of up to `most_tokens`."""
    loaded, _ = load(tp=shape.tp, kv_dtype=shape.kv_dtype)
    mesh = make_mesh(jax.devices("cpu")[device:], shape.tp)
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), loaded.params)
    loaded = replace(loaded, params=params)
    config = Config(
        model=ModelConfig(numerics=numerics, max_model_len=MAX_LEN),
        cache=CacheConfig(page_size=shape.page_size, num_pages=POOL),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=most_tokens),
        transfer=TransferConfig(transfer_chunk_tokens=shape.chunk_tokens, local_prefill=LocalPrefill.ON_FAILURE),
    )
    runner = make_runner(loaded, mesh, config, role, grammars())
    warm_up(runner)
    return loaded, runner
