"""Two turns of a chat between a prefill and a decode engine, and what moved between them for the second."""

from __future__ import annotations

from typing import Any

from jdisagg.core.requests import Provenance
from tests.unit.roles.network_fake import BYTES_PER_TOKEN
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request

PROMPT = tuple(range(3, 14))  # 11 tokens
QUESTION = (7, 8)


def first_turn(world: World, max_tokens: int = 14) -> tuple[int, ...]:
    """Serve it; returns the prompt of the second turn. D has KV of all but the answer's last token."""
    world.submit(request("t1", PROMPT, max_tokens, ignore_eos=True))
    world.settle()
    answer = expected(PROMPT, max_tokens, ignore_eos=True)
    assert world.tokens("t1") == answer
    return (*PROMPT, *answer, *QUESTION)


def read(engine: Any, name: str) -> float:
    """Sum over labels."""
    samples = (sample for metric in engine.metrics.registry.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def moved(world: World) -> tuple[float, float, int]:
    """So far: bytes from P to D, from D to P, tokens that P computed."""
    name = "jdisagg_transfer_bytes_total"
    return read(world.decode, name), read(world.prefill, name), world.prefill.scheduler.stats.prefill_tokens


def since(world: World, before: tuple[float, float, int]) -> tuple[float, float, int]:
    """The same since `before`, bytes as tokens."""
    down, up, computed = (now - then for now, then in zip(moved(world), before, strict=True))
    return down / BYTES_PER_TOKEN, up / BYTES_PER_TOKEN, int(computed)


def provenance_of(world: World, request_id: str) -> Provenance:
    provenance = world.outputs[request_id][-1].provenance
    assert provenance is not None
    return provenance


def serve_second_turn(world: World, prompt: tuple[int, ...]) -> tuple[float, float, int]:
    """Serve it and check its tokens; returns what moved."""
    before = moved(world)
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    world.settle()
    assert world.tokens("t2") == expected(prompt, 4, ignore_eos=True)
    return since(world, before)
