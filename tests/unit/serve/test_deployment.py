"""A process with two engines: what is asked of it is asked of both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jdisagg.api.channels import INSECURE
from jdisagg.api.generation import local_engine
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.core.bits import are_unlike
from jdisagg.core.config import CacheConfig, Config, LocalPrefill, TransferConfig
from jdisagg.core.drill import drill_of
from jdisagg.core.errors import Unavailable
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import Output, Role
from jdisagg.roles import engine_thread
from jdisagg.roles.inbox import Submit
from jdisagg.roles.speed_seen import FEW
from jdisagg.roles.unified import UnifiedRole
from jdisagg.serve import build
from jdisagg.serve.deployment import Deployment
from jdisagg.transfer.drill import TransferDrill
from tests.unit.roles.engine import Engine
from tests.unit.sched.engine_fake import request
from tests.unit.waiting import until as until_there
from tests.unit.wire.rig import WAIT_LIMIT_S, identity, until

CARD = ModelCard(name="m", max_model_len=48, vocab_size=31, eos_token_ids=(0,), fingerprint="f")


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Deployment, list[Engine]]]:
    engines, crashes = [Engine(Role.UNIFIED, 24, local_prefill=True) for _ in range(2)], list[BaseException]()
    cores = [core_of(engine, bits) for engine, bits in zip(engines, getattr(request, "param", ("", "")), strict=True)]
    loop = asyncio.new_event_loop()
    deployment = Deployment(cores[-1], loop, crashes.append)
    for core, engine in zip(cores, engines, strict=True):
        deployment.add_engine(core, UnifiedRole(engine.scheduler))
    yield deployment, engines
    for thread in deployment.engines:
        thread.is_frozen = False
    deployment.stop()
    loop.close()
    assert not crashes


def core_of(engine: Engine, bits: str = "") -> Any:
    parts: dict[str, Any] = {name: getattr(engine, name) for name in ("scheduler", "runner", "inbox", "streams", "metrics")}
    setattr(parts["runner"], "chunk_tokens", 4)  # noqa: B010 - a fake of the loop's, not of the search for NaN
    return SimpleNamespace(
        config=Config(role="colocated"),
        role=Role.UNIFIED,
        loaded=None,
        worker="w",
        epoch="e",
        num_executables=0,
        grammars=None,
        bits=bits,
        **parts,
    )


def test_the_prefix_caches_of_both_are_reset(two: tuple[Deployment, list[Engine]]) -> None:
    async def body() -> None:
        deployment, engines = two
        for thread in deployment.engines:
            local = LocalEngine(thread, CARD, not_ready_reason=lambda: "")
            async for _ in local.generate(request("r", tuple(range(1, 14)), 3)):
                pass
        assert await deployment.reset_prefix_cache() == 2 * 3, "each has kept three pages of four tokens"
        assert [engine.scheduler.reset_prefix_cache() for engine in engines] == [0, 0]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("two", "wanted"),
    [(("", ""), ""), (("48-aa", "48-aa"), "48-aa"), (("48-aa", "48-bb"), "48-aa/48-bb")],
    indirect=["two"],
)
def test_the_bits_are_those_of_both_engines_where_they_round_alike_and_else_of_either(
    two: tuple[Deployment, list[Engine]], wanted: str
) -> None:
    """One worker whose engines have meshes of unlike sizes streams as neither would alone."""
    assert two[0].bits == wanted
    assert are_unlike(two[0].bits, "48-bb") is bool(wanted)


def test_the_state_is_that_of_both_and_of_one_while_the_other_stands_still(
    two: tuple[Deployment, list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        deployment, engines = two
        front = LocalEngine(deployment.front, CARD, not_ready_reason=lambda: "", helpers=deployment.engines[:-1])
        helper = LocalEngine(deployment.engines[0], CARD, not_ready_reason=lambda: "")
        async for _ in helper.generate(request("r", tuple(range(1, 14)), 3)):
            pass
        state = await front.debug_state()
        pages = [part["scheduler"]["prefix_cache"]["pages"] for part in (state, *state["helpers"])]
        assert pages == [0, 3], "the request was the helper's"
        monkeypatch.setattr(local_engine, "ANSWER_TIMEOUT_S", 0.1)
        deployment.engines[0].is_frozen = True
        async with asyncio.timeout(WAIT_LIMIT_S):  # it answers what it had begun to wait for, and a busy front answers late
            while "error" not in (state := await front.debug_state())["helpers"][0] or "error" in state:
                pass
        assert "scheduler" in state
        assert "has not answered" in state["helpers"][0]["error"]
        assert len(engines) == 1 + len(state["helpers"])

    asyncio.run(body())


def test_a_process_is_healthy_while_both_turn_over(
    two: tuple[Deployment, list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        deployment, _ = two
        front = LocalEngine(deployment.front, CARD, not_ready_reason=lambda: "", helpers=deployment.engines[:-1])
        assert front.health().serves
        monkeypatch.setattr(engine_thread, "STALLED_AFTER_S", 0.3)
        deployment.engines[0].is_frozen = True
        await until(lambda: not front.health().healthy)
        assert "no tick has ended" in front.health().reason

    asyncio.run(body())


@pytest.mark.parametrize("first", [0, 1])
def test_clients_of_one_engine_are_told_when_the_other_one_raises(first: int) -> None:
    engines, crashes = [Engine(Role.UNIFIED, 24, local_prefill=True) for _ in range(2)], list[BaseException]()
    loop, outputs = asyncio.new_event_loop(), list[Output]()
    deployment = Deployment(core_of(engines[-1]), loop, crashes.append)
    for engine in engines:
        deployment.add_engine(core_of(engine), UnifiedRole(engine.scheduler))
    for thread in deployment.engines:
        thread.is_frozen = True
    engines[1 - first].inbox.post(Submit(request("r", (1, 2, 3), 40), outputs.extend))
    deployment.engines[first].break_down()
    for thread in (deployment.engines[first], deployment.engines[1 - first]):
        thread.is_frozen = False
        until_there(lambda thread=thread: thread.is_over, "it is over")
    until_there(lambda: len(crashes) == 2, "the process is told")
    assert isinstance(outputs[-1].error, Unavailable)
    assert "the other engine of this process stopped: EngineBroken" in str(crashes[-1])
    deployment.stop()
    loop.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.UNIFIED])
def test_routers_and_decode_workers_are_told_how_fast_a_prefill_worker_computes(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        deployment = Deployment(core, asyncio.get_running_loop(), lambda error: None)
        if role is Role.PREFILL:
            build._add_prefill(deployment, "h:1", INSECURE, TransferDrill(drill_of()))
        else:
            deployment.add_engine(core, UnifiedRole(engine.scheduler))
        for number in range(FEW):
            prompt = (number + 1, *range(2, 13))
            async for _ in LocalEngine(deployment.front, CARD, not_ready_reason=lambda: "").generate(request("r", prompt, 1)):
                pass
        speed = deployment.front.loop.load.speed
        deployment.stop()
        if role is Role.PREFILL:
            assert speed is not None
            assert speed.most / speed.least == pytest.approx(512 / 12), "--max-num-batched-tokens and those of a prompt"
            assert cast(Any, deployment.peer_server)._speed() == speed
        else:
            assert speed is None

    engine = Engine(Role.UNIFIED, 24, local_prefill=True)
    core = core_of(engine)
    core.role, core.identity = role, lambda offered: identity()
    backends = SimpleNamespace(offered=(), num_executables=0, store=None, publishers=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(build, "PrefillBackends", lambda *_: backends)
    monkeypatch.setattr(build, "_borrowed", lambda *_: None)
    monkeypatch.setattr(build, "prefill_role", lambda *_: UnifiedRole(engine.scheduler))
    asyncio.run(body())


@pytest.mark.parametrize(("enabled", "cache_tokens"), [(True, 23 * 16), (False, 1)])
def test_routers_are_told_how_much_its_prefix_cache_holds(enabled: bool, cache_tokens: int) -> None:
    loop = asyncio.new_event_loop()
    core = core_of(Engine(Role.UNIFIED, 24, local_prefill=True))
    core.runner = SimpleNamespace(num_pages=24, page_size=16)
    core.config = Config(role="prefill", cache=CacheConfig(enable_prefix_caching=enabled))
    assert Deployment(core, loop, lambda error: None).cache_tokens == cache_tokens, "the null page holds nothing"
    loop.close()


@pytest.mark.parametrize(
    ("policy", "told", "failures", "ready", "cannot"),
    [
        (
            "never",
            (),
            {},
            "no usable prefill worker (no router knows one that pairs with this worker)",
            "",
        ),  # which the router knows
        ("never", ("p:1",), {}, "", ""),
        ("never", ("p:1",), {"p:1": "gone"}, "no usable prefill worker (p:1: gone)", "no usable prefill worker (p:1: gone)"),
        ("never", ("p:1", "p:2"), {"p:1": "gone", "p:2": ""}, "", ""),
        ("on-failure", ("p:1",), {"p:1": "gone"}, "", ""),
    ],
)
def test_routers_are_told_when_a_decode_worker_that_computes_no_prompts_reaches_no_prefill_worker(
    policy: str, told: tuple[str, ...], failures: dict[str, str], ready: str, cannot: str
) -> None:
    deployment, offered = decoding(TransferConfig(local_prefill=LocalPrefill(policy)), failures)
    deployment.learn_prefill("r:1", told)
    assert offered == [frozenset(told)]
    assert (deployment.not_ready_reason(), deployment.cannot_serve()) == (ready, cannot)


@pytest.mark.parametrize(("static", "told"), [(("p:1", "p:2"), ()), ((), ("p:1", "p:2"))])
@pytest.mark.parametrize(
    ("policy", "obstacles", "reason"),
    [
        ("never", {"p:1": "no KV comes", "p:2": "gone"}, "no usable prefill worker (p:1: no KV comes; p:2: gone)"),
        ("never", {"p:1": "no KV comes", "p:2": ""}, ""),
        ("on-failure", {"p:1": "no KV comes", "p:2": "gone"}, ""),
    ],
)
def test_a_decode_worker_that_computes_no_prompts_is_not_ready_while_no_kv_comes_from_all_that_answer(
    policy: str, obstacles: dict[str, str], reason: str, static: tuple[str, ...], told: tuple[str, ...]
) -> None:
    config = TransferConfig(local_prefill=LocalPrefill(policy), prefill=static)
    deployment, _ = decoding(config, {"p:1": "", "p:2": "gone" if obstacles["p:2"] else ""}, obstacles)
    deployment.learn_prefill("r:1", told)
    assert (deployment.not_ready_reason(), deployment.cannot_serve()) == (reason, reason)


@pytest.mark.parametrize(
    ("told", "failures", "alone"),
    [
        ((), {}, False),  # which the router knows
        (("p:1",), {}, False),
        (("p:1",), {"p:1": "gone"}, True),
        (("p:1", "p:2"), {"p:1": "gone", "p:2": ""}, False),
        (("p:1", "p:2"), {"p:1": "gone", "p:2": "draining"}, True),
    ],
)
@pytest.mark.parametrize("policy", ["never", "on-failure", "below-tokens"])
def test_routers_are_told_when_a_decode_worker_reaches_no_prefill_worker_though_it_may_compute_prompts(
    policy: str, told: tuple[str, ...], failures: dict[str, str], alone: bool
) -> None:
    deployment, _ = decoding(TransferConfig(local_prefill=LocalPrefill(policy)), failures)
    deployment.learn_prefill("r:1", told)
    assert deployment.is_alone() is alone
    deployment.peer_client = None
    assert not deployment.is_alone(), "one that asks no prefill workers misses none"


def decoding(
    config: TransferConfig, failures: dict[str, str], obstacles: dict[str, str] | None = None
) -> tuple[Deployment, list[frozenset[str]]]:
    """A decode worker that has found out so much, and what it is told of."""
    offered, loop = list[frozenset[str]](), asyncio.new_event_loop()
    core = core_of(Engine(Role.DECODE, 24, local_prefill=True))
    core.config = Config(role="decode", transfer=config)
    deployment = Deployment(core, loop, lambda error: None)
    loop.close()
    known = {"failures": lambda: failures, "obstacles": lambda: failures if obstacles is None else obstacles}
    deployment.peer_client = cast(GrpcPeerClient, SimpleNamespace(offer=offered.append, **known))
    return deployment, offered
