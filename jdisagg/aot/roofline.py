"""Step times that no implementation can beat: bytes over bandwidth, products over peak rate, and the collectives' bytes. And,
for kinds of devices on which steps were measured, the times to expect.

Per device, dividing by the mesh what is cut over it. Memory and arithmetic overlap, so the longer one counts (Williams,
Waterman and Patterson, 2009); collectives are added, as a ring moves them. Assumed: every weight is read once a step, the KV
of every row once, logits are written and read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jax.sharding import Mesh

from jdisagg.aot.abstract import ModelForm, bytes_per_device
from jdisagg.aot.accelerators import Accelerator
from jdisagg.aot.budget import Budget
from jdisagg.engine.buckets import EXACT_ROWS
from jdisagg.engine.runner import RunnerShape
from jdisagg.kv.layout import KVLayout
from jdisagg.kv.spec import ITEM_BYTES

_BATCHES = (8, 32, 128)
_CONTEXTS = (1024, 8192)
_LOGIT_BYTES = 4 * 2  # float32, written and read
_ALL_REDUCE = 2  # times its bytes that each device sends, there and back; an all-gather sends them once


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step: `rows` sequences that feed `tokens` tokens altogether, at contexts of `context` tokens."""

    phase: str  # decode | prefill
    rows: int
    tokens: int
    context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Its bound. `bound_by` is memory, arithmetic or interconnect: whichever takes longest."""

    workload: Workload
    num_bytes: float  # one device reads and writes
    flops: float  # one device
    memory_s: float
    arithmetic_s: float
    interconnect_s: float
    step_s: float
    tokens_per_s: float
    bound_by: str
    expected_s: float | None = None  # where the device was measured, in bfloat16


@dataclass(frozen=True)
class Roofline:
    """The bounds of one model on one mesh of one kind of device."""

    form: ModelForm
    mesh: Mesh
    layout: KVLayout
    accelerator: Accelerator

    def time(self, work: Workload) -> StepTime | None:
        """The bound of one step. None without peak rates."""
        device = self.accelerator
        rate = device.flops_per_s.get(self.form.dtype)
        if device.bytes_per_s is None or device.link_bytes_per_s is None or rate is None:
            return None
        num_bytes, flops = self._bytes(work), self._flops(work)
        times = {
            "memory": num_bytes / device.bytes_per_s,
            "arithmetic": flops / rate,
            "interconnect": _sent_bytes(self.form, work, self.mesh.size) / device.link_bytes_per_s,
        }
        step_s = max(times["memory"], times["arithmetic"]) + times["interconnect"]
        return StepTime(
            workload=work,
            num_bytes=num_bytes,
            flops=flops,
            memory_s=times["memory"],
            arithmetic_s=times["arithmetic"],
            interconnect_s=times["interconnect"],
            step_s=step_s,
            tokens_per_s=work.tokens / step_s,
            bound_by=max(times, key=lambda kind: times[kind]),
            expected_s=self._expected_s(work, num_bytes, flops, times["interconnect"]),
        )

    def _expected_s(self, work: Workload, num_bytes: float, flops: float, sent_s: float) -> float | None:
        reached = self.accelerator.reached
        if reached is None or self.form.dtype != "bfloat16":
            return None
        device_s = sent_s + reached.expected_s(num_bytes=num_bytes, flops=flops, num_layers=self.form.spec.num_layers)
        return max(device_s, reached.decode_call_s) if work.phase == "decode" else device_s

    def _bytes(self, work: Workload) -> float:
        per_token = self.layout.bytes_per_page / self.layout.page_size / self.layout.num_shards / self.form.spec.num_layers
        seen = sum(work.rows * _reach(work.context, window) for window in self.form.spec.attention.windows)
        logits = _LOGIT_BYTES * work.rows * self.form.spec.vocab_size
        written = work.tokens * self.form.spec.num_layers * per_token
        return self._read_weights + seen * per_token + written + logits

    def _flops(self, work: Workload) -> float:
        """Two for each weight and token, four for each key, query head and feature."""
        spec, tp = self.form.spec, self.mesh.size
        head = 2.0 * spec.embed * spec.vocab_size / (tp if spec.vocab_size % tp == 0 else 1)
        dense = 2.0 * self._read_weights / ITEM_BYTES[self.form.dtype] * work.tokens - head * (work.tokens - work.rows)
        keys = sum(_seen_keys(work, window) for window in spec.attention.windows)
        return dense + 4.0 * keys * spec.attention.num_heads * spec.attention.head_dim / tp

    @cached_property
    def _read_weights(self) -> float:
        """Bytes on one device of all weights but an embedding of which a step only looks up rows."""
        params = self.form.params(self.mesh)
        looked_up = 0 if self.form.spec.tied else bytes_per_device(params["embed_tokens"])
        return bytes_per_device(params) - looked_up


def workloads(budget: Budget, runner: RunnerShape, slots: int) -> list[Workload]:
    """What the executables of `runner` can be given: decode of up to `slots` rows at a few batches and contexts that the pool
    holds, prefill of one full step."""
    found = []
    most = EXACT_ROWS if runner.exact else slots
    tokens = EXACT_ROWS if runner.exact else max((bucket.num_tokens for bucket in runner.prefill), default=0)
    if runner.decode or runner.exact:
        batches = {1, min(slots, most)} | {size for size in _BATCHES if size < min(slots, most)}
        cells = {(min(size, budget.max_model_len, budget.kv_tokens // b), b) for size in _CONTEXTS for b in batches}
        found += [Workload(phase="decode", rows=b, tokens=b, context=c) for c, b in sorted(cells) if c]
    if tokens:
        context = min(tokens, budget.max_model_len)
        found.append(Workload(phase="prefill", rows=1, tokens=context, context=context))
    return found


def _sent_bytes(form: ModelForm, work: Workload, num_devices: int) -> float:
    """What each device sends around a ring: two all-reduces a layer, one of the embedding, and the logits gathered."""
    if num_devices == 1:
        return 0.0
    reduced = (2 * form.spec.num_layers + 1) * work.tokens * form.spec.embed * ITEM_BYTES[form.dtype]
    gathered = 4 * work.rows * form.spec.vocab_size
    return (_ALL_REDUCE * reduced + gathered) * (num_devices - 1) / num_devices


def _seen_keys(work: Workload, window: int | None) -> float:
    """Keys that all tokens of a step see in one layer; a prompt's see more and more, until their window is full."""
    reach = _reach(work.context, window)
    return work.tokens * reach - (0 if work.phase == "decode" else reach * (reach - 1) / 2)


def _reach(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)
