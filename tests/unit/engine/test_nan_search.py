"""A NaN in the logits is traced to the lowest layer whose KV holds one; the request fails alone, with that in its message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.core.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from jdisagg.core.errors import ConfigError, NumericalError
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output, Role, SamplingParams
from jdisagg.engine.build import make_runner
from jdisagg.engine.nan_search import MAX_CHUNKS, NanSearch
from jdisagg.engine.runner import ModelRunner
from jdisagg.roles.engine_loop import EngineLoop
from jdisagg.roles.inbox import Inbox, Submit
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import StepPipeline
from jdisagg.roles.self_test import self_test
from jdisagg.roles.streams import Streams
from jdisagg.roles.unified import UnifiedRole
from jdisagg.sched.plan import PageTable
from jdisagg.sched.scheduler import Scheduler
from jdisagg.serve.build import build_deployment
from jdisagg.transfer.base import Piece
from tests.e2e.tiny_model import make_tiny_model
from tests.unit.engine.support import load, make, prompt_of

PROMPT, OTHER = prompt_of(21), prompt_of(13, seed=1)
RARE = next(token for token in range(1, 97) if token not in PROMPT + OTHER)


class World:
    """A unified engine on a real runner, ticked by hand."""

    def __init__(self, runner: ModelRunner, find_nan: Callable[[PageTable, int], str] | None = None) -> None:
        self.runner, self.metrics, self.streams, self.inbox = runner, Metrics(), Streams(), Inbox()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            role=Role.UNIFIED,
            max_model_len=runner.max_model_len,
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            eos_token_ids=(0,),
        )
        search = find_nan or NanSearch(runner.export_tokens, runner.chunk_tokens)
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            pipeline=StepPipeline(self.scheduler, runner, search),
            role=UnifiedRole(self.scheduler),
            inbox=self.inbox,
            streams=self.streams,
            metrics=self.metrics,
            observer=TickObserver(self.scheduler, self.metrics, Role.UNIFIED),
            worker="w",
        )
        self.outputs: dict[str, list[Output]] = {}

    def submit(self, name: str, prompt: Sequence[int], num: int = 8) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True)
        request = EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, deadline_s=1e9)
        self.inbox.post(Submit(request, self.outputs.setdefault(name, []).extend))

    def run(self, max_ticks: int = 100) -> World:
        for _ in range(max_ticks):
            self.loop.tick(0.0)
            if not len(self.streams) and self.scheduler.is_idle():
                break
        self.scheduler.check()
        assert self.scheduler.num_free_pages == self.scheduler.num_pages
        return self

    def tokens(self, name: str) -> list[int]:
        assert all(output.error is None for output in self.outputs[name])
        return [token for output in self.outputs[name] for token in output.token_ids]

    def message(self, name: str) -> str:
        error = self.outputs[name][-1].error
        assert isinstance(error, NumericalError), self.outputs[name]
        return error.message


@pytest.fixture(scope="module")
def healthy() -> World:
    """What both prompts get when nothing is wrong; nothing is searched."""

    def never(page_table: PageTable, num_tokens: int) -> str:
        raise AssertionError("a healthy tick searched for a NaN")

    world = World(make(), never)
    world.submit("prompt", PROMPT)
    world.submit("other", OTHER)
    return world.run()


def broken(change: Callable[[dict[str, Any]], None]) -> ModelRunner:
    """A runner whose parameters `change` has edited."""
    loaded, mesh = load()
    params = jax.tree.map(lambda x: x, loaded.params)
    change(params)
    config = Config(
        model=ModelConfig(max_model_len=64),
        cache=CacheConfig(page_size=4, num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    return make_runner(replace(loaded, params=params), mesh, config, Role.UNIFIED)


def one_nan(linear: dict[str, Any], name: str = "kernel") -> None:
    linear[name] = linear[name].at[0, 0].set(jnp.nan)


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "v_proj of layer 1": (lambda p: one_nan(p["layers"][1]["self_attn"]["v_proj"]), "first in layer 1's values of token 0"),
    "k_proj of layer 0": (lambda p: one_nan(p["layers"][0]["self_attn"]["k_proj"]), "first in layer 0's keys of token 0"),
    "mlp of layer 0": (
        lambda p: one_nan(p["layers"][0]["mlp"]["down_proj"]),
        "first in layer 1's keys and values of token 0",
    ),
    "mlp of the last layer": (lambda p: one_nan(p["layers"][1]["mlp"]["down_proj"]), "in none of the 2 layers' KV"),
    "lm_head": (lambda p: one_nan(p["lm_head"]), "the final norm or the output head"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_layer_of_a_bad_weight_is_named(case: str) -> None:
    change, wanted = PLANTED[case]
    world = World(broken(change))
    world.submit("prompt", PROMPT)
    message = world.run().message("prompt")
    assert wanted in message, message
    assert "request prompt: step " in message
    assert world.metrics.engine.nan_requests._value.get() == 1


def test_a_bad_embedding_row_fails_only_requests_that_use_it(healthy: World) -> None:
    world = World(broken(lambda params: one_nan_row(params["embed_tokens"])))
    world.submit("other", OTHER)
    world.submit("bad", [*PROMPT[:9], RARE, *PROMPT[9:]])
    world.submit("prompt", PROMPT)
    world.run()
    assert "first in layer 0's keys and values of token 9)" in world.message("bad")
    assert world.tokens("other") == healthy.tokens("other")
    assert world.tokens("prompt") == healthy.tokens("prompt")


def one_nan_row(embedding: dict[str, Any]) -> None:
    embedding["embedding"] = embedding["embedding"].at[RARE].set(jnp.nan)


def test_kv_gone_bad_while_decoding_is_found_where_it_lies_and_the_neighbour_goes_on(healthy: World) -> None:
    world = World(make())
    world.submit("prompt", PROMPT)
    world.submit("other", OTHER)
    for _ in range(4):
        world.loop.tick(0.0)
    spoil(world, "prompt", layer=1, token=10)
    world.run()
    assert world.message("prompt").endswith("first in layer 1's keys of token 10); other requests go on")
    assert world.tokens("other") == healthy.tokens("other")
    world.submit("again", PROMPT)
    assert world.run().tokens("again") == healthy.tokens("prompt"), "the bad page is in no prefix cache"


def spoil(world: World, name: str, *, layer: int, token: int) -> None:
    """One NaN into the first key feature of one token."""
    pages, begin = world.scheduler.page_table(name), token - token % world.runner.chunk_tokens
    piece = world.runner.export_tokens(pages, begin, begin + world.runner.chunk_tokens)
    data = np.array(piece.data)
    data[layer, token - begin, 0, 0] = np.nan
    world.runner.import_tokens(pages, replace(piece, data=jax.device_put(data, piece.data.sharding)))


def test_one_failed_request_per_turn_is_searched() -> None:
    asked: list[int] = []
    world = World(broken(lambda params: one_nan(params["lm_head"])), lambda _, num_tokens: asked.append(num_tokens) or "HERE")
    for number in range(3):
        world.submit(f"r{number}", PROMPT[: 4 + number])
    world.run()
    assert ["HERE" in world.message(f"r{number}") for number in range(3)] == [True, False, False]
    assert asked == [4]


def test_a_search_that_cannot_read_the_kv_costs_nobody_else_anything(
    healthy: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = broken(lambda params: one_nan_row(params["embed_tokens"]))

    def refuses(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setitem(runner.device._functions, "export", refuses)
    world = World(runner)
    world.submit("bad", [RARE, 5, 6])
    world.submit("other", OTHER)
    world.run()
    assert "its KV could not be searched" in world.message("bad")
    assert "RESOURCE_EXHAUSTED" in caplog.text
    assert world.tokens("other") == healthy.tokens("other")


def test_a_long_context_is_read_at_its_start_and_its_end_only() -> None:
    read: list[tuple[int, int]] = []

    def export(page_table: PageTable, begin: int, end: int) -> Piece:
        read.append((begin, end))
        data = np.zeros((3, 8, 1, 4), np.float32)
        if begin == 96:
            data[2, 1, 0, 3] = np.nan
        return Piece(begin=begin, end=end, data=cast(Any, data))

    text = NanSearch(export, 8)(((1, 2),), 99)
    assert len(read) == MAX_CHUNKS
    assert (read[0], read[-1]) == ((0, 8), (96, 99))
    assert text == "first in layer 2's values of token 97 (tokens [56, 96) were not looked at)"


def test_infinity_is_found_before_the_nan_that_comes_of_it() -> None:
    data = np.zeros((3, 4, 1, 4), np.float16)
    data[1, 2, 0, 0], data[2, 2] = np.inf, np.nan  # as of keys that float16 cannot hold

    def export(page_table: PageTable, begin: int, end: int) -> Piece:
        return Piece(begin=begin, end=end, data=cast(Any, data))

    assert NanSearch(export, 4)(((1,),), 4) == "first in layer 1's keys of token 2"


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "first in layer 1's values of token 0"),
        ("lm_head.weight", "the final norm or the output head"),
    ],
)
def test_a_checkpoint_with_a_nan_never_serves_and_says_where_it_is(tensor: str, wanted: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny", max_model_len=64)
    weights = load_file(directory / "model.safetensors")
    weights[tensor][2, 3] = np.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = Config(
        role="unified",
        model=ModelConfig(model=str(directory), max_model_len=64),
        cache=CacheConfig(num_pages=16),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
    )
    crashes: list[BaseException] = []
    with asyncio.Runner() as runner:
        deployment = build_deployment(config, Metrics(), "w", runner.get_loop(), crashes.append)
        try:
            with pytest.raises(ConfigError, match="the self-test failed: .*" + wanted) as refused:
                self_test(deployment.front)
            assert refused.value.exit_status == 2, "the next start would find it, too"
        finally:
            deployment.stop()
    assert not crashes
