"""From what a device step left behind to `Sampled` and prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdisagg.core.requests import TokenLogprob
from jdisagg.engine.packing import Packed
from jdisagg.engine.sampler import Logprobs
from jdisagg.engine.steps import StepOut
from jdisagg.sched.plan import Sampled


@dataclass(frozen=True, slots=True)
class Part:
    """One dispatched device step of a plan."""

    packed: Packed
    out: StepOut
    num_top: Mapping[int, int]  # slot -> alternatives wanted; slots without log-probabilities are left out

    def ends_with(self) -> tuple[jax.Array, tuple[Logprobs, ...]]:
        """What is there when the device is through with it."""
        return self.out.sampling.tokens, self.out.prompt

    def wanted(self) -> dict[str, Any]:
        """The arrays the host has to read: logprobs only when somebody asked."""
        arrays: dict[str, Any] = {}
        if self.packed.samples:
            arrays["tokens"], arrays["bad"] = self.out.sampling.tokens, self.out.sampling.bad
        if self.num_top:
            arrays["logprobs"] = self.out.sampling.logprobs
        if self.packed.targets:
            arrays["prompt"] = self.out.prompt
        return arrays


def read(parts: Sequence[Part], step_id: int) -> tuple[tuple[Sampled, ...], dict[int, tuple[TokenLogprob, ...]]]:
    """Wait for the parts and read them with one `device_get`.

    Also for those of which nothing is read: else the host would dispatch a long prompt to its end at once, and KV of its first
    chunk, gathered when its receiver asks for it, would wait for the last one.
    """
    jax.block_until_ready([part.ends_with() for part in parts])
    sampled: dict[int, Sampled] = {}
    prompts: dict[int, tuple[TokenLogprob, ...]] = {}
    arrays = jax.device_get([part.wanted() for part in parts])
    for part, values in zip(parts, arrays, strict=True):
        for row, slot in part.packed.samples:
            new = _sampled(values, row, slot, part.num_top.get(slot), step_id)
            sampled[slot] = _joined(sampled[slot], new) if slot in sampled else new
        for targets in part.packed.targets:
            rows = zip(targets.rows, targets.token_ids, strict=True)
            found = tuple(_scored(values["prompt"], row, token, targets.num_top) for row, token in rows)
            prompts[targets.slot] = prompts.get(targets.slot, ()) + found
    return tuple(sampled.values()), prompts


def _joined(first: Sampled, then: Sampled) -> Sampled:
    """What one slot got in a row of steps; nothing that follows a bad token means anything."""
    if first.bad is not None:
        return first
    logprobs = None if first.logprobs is None else first.logprobs + (then.logprobs or ())
    return Sampled(slot=first.slot, token_ids=first.token_ids + then.token_ids, logprobs=logprobs, bad=then.bad)


def _sampled(values: Mapping[str, Any], row: int, slot: int, num_top: int | None, step_id: int) -> Sampled:
    token = int(values["tokens"][row])
    if values["bad"][row]:
        bad = f"the model's logits hold infinity or NaN (step {step_id}, slot {slot}); check the weights, or use float32"
        return Sampled(slot=slot, token_ids=(token,), bad=bad)
    logprobs = None if num_top is None else (_logprob(values["logprobs"], row, token, num_top),)
    return Sampled(slot=slot, token_ids=(token,), logprobs=logprobs)


def _scored(pieces: Sequence[Any], row: int, token: int, num_top: int) -> TokenLogprob:
    piece, row = divmod(row, len(pieces[0].chosen))
    return _logprob(pieces[piece], row, token, num_top)


def _logprob(values: Any, row: int, token: int, num_top: int) -> TokenLogprob:
    top = zip(values.top_ids[row][:num_top].tolist(), values.top[row][:num_top].tolist(), strict=True)
    return TokenLogprob(token_id=token, logprob=float(values.chosen[row]), top=tuple(top))
