"""An engine without a device: everything `serve` would compile, on abstract arrays. Nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.core.config import LayerLoop
from jdisagg.engine import state as slots
from jdisagg.engine.executables import Executable, executables
from jdisagg.engine.functions import jit_functions
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.signatures import Operand
from jdisagg.engine.sizing import EngineSizes
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.models.declare import Declared, Path, build, declarations
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec
from jdisagg.models.stacking import over_layers


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """A model as one engine holds it."""

    spec: ModelSpec
    dtype: str  # of parameters and activations
    kv_dtype: str
    layer_loop: LayerLoop  # UNROLLED or SCAN

    def with_layers(self, num_layers: int) -> ModelForm:
        """The same model, cut off after its first layers."""
        attention = replace(self.spec.attention, windows=self.spec.attention.windows[:num_layers])
        return replace(self, spec=replace(self.spec, num_layers=num_layers, attention=attention))

    @property
    def num_params(self) -> int:
        """Of the whole model, each once."""
        return sum(math.prod(declared.shape) for declared in declarations(self.spec).values())

    def params(self, mesh: Mesh) -> dict[str, Any]:
        """Shapes, dtypes and shardings of its weights on `mesh`, as `load_model` would put them there."""

        def make(path: Path, declared: Declared) -> jax.ShapeDtypeStruct:
            shape, sharding = declared.shape, param_sharding(mesh, self.spec, declared)
            if self.layer_loop is LayerLoop.SCAN and path[0] == "layers":
                shape, sharding = (self.spec.num_layers, *shape), over_layers(sharding)
            return jax.ShapeDtypeStruct(shape, self.dtype, sharding=sharding)

        params = build(self.spec, make)
        return {**params, "layers": params["layers"][0]} if self.layer_loop is LayerLoop.SCAN else params

    def layout(self, mesh: Mesh, page_size: int) -> KVLayout:
        """How its KV lies on `mesh`. Raises ConfigError as `choose_layout` does."""
        return choose_layout(self.spec.kv_spec(self.kv_dtype), mesh, page_size)


@dataclass(frozen=True, kw_only=True)
class AbstractEngine:
    """What `Device` is to a worker, for lowering only."""

    form: ModelForm
    mesh: Mesh  # of abstract devices, or real ones that are never used
    page_size: int
    sizes: EngineSizes

    @cached_property
    def layout(self) -> KVLayout:
        """Of the KV pool."""
        return self.form.layout(self.mesh, self.page_size)

    @cached_property
    def params(self) -> dict[str, Any]:
        """Of the weights."""
        return self.form.params(self.mesh)

    @cached_property
    def kv(self) -> KVGroup:
        """Of the pool's arrays."""
        return _placed(self.layout.abstract(self.sizes.num_pages), NamedSharding(self.mesh, self.layout.partition))

    @cached_property
    def state(self) -> slots.DecodeState:
        """Of the decode state."""
        sizes = self.sizes.device
        new_state = partial(slots.new_state, sizes.max_num_seqs, sizes.pages_per_seq, sizes.vocab_size)
        return _placed(jax.eval_shape(new_state), self._whole)

    def with_layers(self, num_layers: int) -> AbstractEngine:
        """The same engine of a shallower model, page for page."""
        return replace(self, form=self.form.with_layers(num_layers))

    def executables(self) -> Iterator[Executable]:
        """All that a worker would compile."""
        return executables(self.sizes.runner, self.sizes.device)

    def arguments(self, executable: Executable) -> tuple[Any, ...]:
        """What one of them is called with."""
        return (*map(self.operand, executable.signature.takes), *_placed(executable.arguments, self._whole))

    def operand(self, operand: Operand) -> Any:
        """One thing on the device, as functions take it."""
        match operand:
            case Operand.PARAMS:
                return self.params
            case Operand.POOL:
                return (self.kv,)
            case Operand.GROUP:
                return self.kv
            case Operand.STATE:
                return self.state
            case Operand.HIDDEN:
                return _placed(self._model.abstract_hidden(self.params, self.sizes.device.prefill_tokens), self._whole)
            case Operand.PIECE:
                piece = self.layout.abstract_rows(self.sizes.device.chunk_tokens)
                return _placed(piece, self.layout.piece_sharding(self.mesh))

    def lower(self, executable: Executable) -> Any:
        """A `jax.stages.Lowered` of one of them, for the mesh's devices."""
        with jax.set_mesh(self.mesh):
            return self._functions[executable.name].lower(*self.arguments(executable))

    @cached_property
    def _functions(self) -> dict[str, Any]:
        return jit_functions(self._model, self.layout, self.mesh, hidden_rows=self.sizes.device.prefill_tokens)

    @property
    def _model(self) -> DecoderModel:
        return DecoderModel(self.form.spec, choose_ops(self.layout, self.mesh), self.form.layer_loop)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device of the mesh holds of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
