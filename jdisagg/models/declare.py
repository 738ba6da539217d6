"""Every parameter of a decoder, declared once: shape, logical axes, initial scale, name and orientation in a checkpoint.

The nnx modules hold shapes, never arrays. Attribute names are those of Hugging Face checkpoints, so a parameter's name in
the file follows from its path. Initialisation, sharding and loading all read this one declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jdisagg.core.errors import ConfigError
from jdisagg.models.spec import ModelSpec

Path = tuple[str | int, ...]  # of a leaf in the parameter dict: ("layers", 3, "self_attn", "q_proj", "kernel")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One parameter."""

    name: str  # in a Hugging Face checkpoint
    shape: tuple[int, ...]  # in memory
    axes: tuple[str, ...]  # logical axis of each dimension
    transposed: bool  # the checkpoint holds the other orientation
    scale: float | None  # standard deviation of a random initial value; None = all ones


Make = Callable[[Path, Declared], Any]  # of one parameter
Build = Callable[[ModelSpec, Make], dict[str, Any]]  # of all: `build`, or `stacking.build_stacked`


class Linear(nnx.Module):
    """y = x @ kernel + bias. [in, out]: for 2-16 rows XLA:CPU multiplies that 1.3-1.8 times faster than [out, in]."""

    def __init__(self, inputs: tuple[str, int], outputs: tuple[str, int], *, bias: bool) -> None:
        scale = inputs[1] ** -0.5
        self.kernel = _param(inputs, outputs, file_name="weight", transposed=True, scale=scale)
        if bias:
            self.bias = _param(outputs, file_name="bias", scale=0.1)


class Norm(nnx.Module):
    """RMSNorm."""

    def __init__(self, axis: tuple[str, int]) -> None:
        self.scale = _param(axis, file_name="weight", scale=None)


class Embedding(nnx.Module):
    """One row per token id; the output matrix too when tied. Unit rows keep the residual stream at unit scale."""

    def __init__(self, spec: ModelSpec) -> None:
        self.embedding = _param(("vocab", spec.vocab_size), ("embed", spec.embed), file_name="weight", scale=1.0)


class Attention(nnx.Module):
    """Grouped-query attention; kv heads may be fewer than devices, see `sharding`."""

    def __init__(self, spec: ModelSpec) -> None:
        a = spec.attention
        embed = ("embed", spec.embed)
        heads, kv_heads = ("heads", a.num_heads * a.head_dim), ("kv_heads", a.num_kv_heads * a.head_dim)
        self.q_proj = Linear(embed, heads, bias=a.qkv_bias)
        self.k_proj = Linear(embed, kv_heads, bias=a.qkv_bias)
        self.v_proj = Linear(embed, kv_heads, bias=a.qkv_bias)
        self.o_proj = Linear(heads, embed, bias=a.out_bias)
        if a.qk_norm:
            self.q_norm = Norm(("head_dim", a.head_dim))
            self.k_norm = Norm(("head_dim", a.head_dim))


class Mlp(nnx.Module):
    """Gated: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        embed, mlp = ("embed", spec.embed), ("mlp", spec.mlp)
        self.gate_proj = Linear(embed, mlp, bias=spec.mlp_bias)
        self.up_proj = Linear(embed, mlp, bias=spec.mlp_bias)
        self.down_proj = Linear(mlp, embed, bias=spec.mlp_bias)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, spec: ModelSpec) -> None:
        self.input_layernorm = Norm(("embed", spec.embed))
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = Norm(("embed", spec.embed))
        self.mlp = Mlp(spec)


class Decoder(nnx.Module):
    """The whole model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.embed_tokens = Embedding(spec)
        self.layers = nnx.List([Block(spec) for _ in range(spec.num_layers)])
        self.norm = Norm(("embed", spec.embed))
        if not spec.tied:
            self.lm_head = Linear(("embed", spec.embed), ("vocab", spec.vocab_size), bias=False)


@lru_cache(maxsize=16)  # half a second for 126 layers, and `jdisagg.aot` asks for every tensor-parallel size it tries
def declarations(spec: ModelSpec) -> Mapping[Path, Declared]:
    """All parameters of a model by path, in a fixed order."""
    found: dict[Path, Declared] = {}
    for path, param in nnx.to_flat_state(nnx.state(Decoder(spec))):
        metadata = param.get_metadata()
        names = [str(part) for part in path[:-1]]
        prefix = () if names[0] == "lm_head" else ("model",)
        found[tuple(part if isinstance(part, int) else str(part) for part in path)] = Declared(
            name=".".join((*prefix, *names, metadata["file_name"])),
            shape=tuple(param.get_value().shape),
            axes=metadata["logical_axes"],
            transposed=metadata["transposed"],
            scale=metadata["scale"],
        )
    return MappingProxyType(found)


def build(spec: ModelSpec, make: Make) -> dict[str, Any]:
    """The parameter dict, each leaf made by `make`: {"embed_tokens", "layers": [one dict per layer], "norm", "lm_head"?}.
    Raises ConfigError with the tensor's name where `make` raises OverflowError."""
    params: dict[str, Any] = {"layers": [{} for _ in range(spec.num_layers)]}
    for path, declared in declarations(spec).items():
        node: Any = params
        for part in path[:-1]:
            node = node[part] if isinstance(part, int) else node.setdefault(part, {})
        try:
            node[path[-1]] = make(path, declared)
        except OverflowError as error:
            text = f"--dtype: tensor {declared.name} has {error}; use bfloat16 or float32"
            raise ConfigError(text) from error
    return params


def named_leaves(spec: ModelSpec, params: Mapping[str, Any]) -> Iterator[tuple[Path, Declared, Any]]:
    """The parameters of a dict that `build` made."""
    for path, declared in declarations(spec).items():
        yield path, declared, reduce(lambda node, part: node[part], path, cast(Any, params))


def _param(
    *axes: tuple[str, int], file_name: str, transposed: bool = False, scale: float | None
) -> nnx.Param[jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct(tuple(size for _, size in axes), np.float32)
    return nnx.Param(
        shape,
        logical_axes=tuple(name for name, _ in axes),  # not nnx's own key: that one is renamed between flax releases
        file_name=file_name,
        transposed=transposed,
        scale=scale,
    )
