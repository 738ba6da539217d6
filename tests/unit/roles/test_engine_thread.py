"""The thread around an engine: what a step that raises or hangs does to the process and to its clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.roles import engine_thread
from jdisagg.roles import watchdog as watchdog_module
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.inbox import Submit
from jdisagg.roles.self_test import self_test
from jdisagg.roles.unified import UnifiedRole
from jdisagg.roles.watchdog import EXIT_STEP_TIMEOUT, Watchdog
from jdisagg.sched.plan import Plan, StepResult
from tests.unit.roles.engine import Engine
from tests.unit.sched.engine_fake import expected, request
from tests.unit.waiting import until


class Running:
    """A unified engine on its thread."""

    def __init__(self) -> None:
        self.engine = Engine(Role.UNIFIED, 24, local_prefill=True)
        self.engine.run(UnifiedRole(self.engine.scheduler))
        assert self.engine.loop is not None
        self.crashes: list[BaseException] = []
        self.outputs: list[Output] = []
        self.thread = EngineThread(self.engine.loop, name="engine", on_crash=self.crashes.append)
        self.thread.start()

    def submit(self, name: str, max_tokens: int = 4) -> None:
        self.engine.inbox.post(Submit(request(name, (1, 2, 3), max_tokens), self.outputs.extend))


@pytest.fixture
def running():
    made = Running()
    yield made
    made.thread.is_frozen = False
    assert made.thread.stop(30.0)


def test_requests_run_and_the_self_test_passes(running: Running) -> None:
    self_test(running.thread)
    running.submit("a")
    until(lambda: running.outputs and running.outputs[-1].finish, "the request ends")
    assert [token for output in running.outputs for token in output.token_ids] == expected((1, 2, 3), 4)
    assert running.thread.unhealthy_reason(time.monotonic()) == ""


def test_an_engine_that_is_made_to_raise_is_over_as_one_whose_step_did(running: Running) -> None:
    running.thread.is_frozen = True
    running.submit("a", 40)
    running.thread.break_down()
    running.thread.is_frozen = False
    until(lambda: running.crashes, "the process is told")
    assert isinstance(running.crashes[0], engine_thread.EngineBroken)
    assert running.thread.is_over
    assert isinstance(running.outputs[-1].error, Unavailable)


def test_a_step_that_raises_tells_every_client_and_the_process(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Plan) -> StepResult:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(running.engine.runner, "dispatch", broken)
    running.submit("a")
    running.submit("b")
    until(lambda: running.crashes, "the crash is reported")
    assert "the device is gone" in str(running.crashes[0])
    assert running.thread.is_over
    assert sorted(output.request_id for output in running.outputs) == ["a", "b"]
    assert all(output.finish is FinishReason.ERROR for output in running.outputs)
    assert all(isinstance(output.error, Unavailable) for output in running.outputs)
    assert "the device is gone" in running.thread.unhealthy_reason(time.monotonic())


def test_a_frozen_engine_is_unhealthy_after_five_seconds(running: Running) -> None:
    running.thread.is_frozen = True
    time.sleep(0.1)
    now_s = time.monotonic()
    assert running.thread.unhealthy_reason(now_s) == ""
    assert "no tick has ended" in running.thread.unhealthy_reason(now_s + 5.1)


def test_a_step_that_hangs_ends_the_process(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    collect = running.engine.runner.collect

    def hanging(handle: StepResult) -> StepResult:
        release.wait(60.0)
        return collect(handle)

    monkeypatch.setattr(running.engine.runner, "collect", hanging)
    exits: list[int] = []
    watchdog = Watchdog([running.thread], 0.2, on_timeout=exits.append)
    watchdog.start()
    time.sleep(0.5)
    assert exits == []  # an idle engine is no hanging one
    running.submit("a")
    until(lambda: exits, "the watchdog ends the process")
    assert exits == [EXIT_STEP_TIMEOUT]
    release.set()
    watchdog.stop()


def test_a_process_that_was_stopped_blames_no_step(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody's clock went on by a minute while nothing ran, first in an idle tick, then within a step."""
    stood_s, released = [0.0], threading.Event()
    for module in (watchdog_module, engine_thread):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + stood_s[0])
    monkeypatch.setattr(running.engine.runner, "collect", _waiting(running.engine.runner.collect, released))
    exits: list[int] = []
    watchdog = Watchdog([running.thread], 2.0, on_timeout=exits.append)
    watchdog.start()
    told = "this process stood still for 6"  # sixty seconds and something
    try:
        stood_s[0] = 60.0
        until(lambda: caplog.text.count(told) == 1, "it is noticed in an idle tick")
        running.submit("a")
        until(lambda: running.thread.step_running_s(time.monotonic() + 60.0) > 0.1, "the step runs")
        stood_s[0] = 120.0
        until(lambda: caplog.text.count(told) == 2, "it is noticed within a step")
        assert exits == []
        until(lambda: exits, "the step hangs all the same")
    finally:
        released.set()
        watchdog.stop()


@pytest.mark.parametrize(("stood_s", "dead_after_s", "is_told"), [(1.5, 1.0, True), (1.5, 5.0, False), (6.0, 10.0, True)])
def test_a_process_that_stood_still_for_as_long_as_makes_it_dead_says_so(
    stood_s: float, dead_after_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else only the logs of others tell of it, each of another culprit."""
    stood = [0.0]
    monkeypatch.setattr(watchdog_module, "monotonic", lambda: time.monotonic() + stood[0])
    watchdog = Watchdog([], 2.0, dead_after_s=dead_after_s)
    watchdog.start()
    try:
        stood[0] = stood_s
        if is_told:
            until(lambda: "this process stood still for" in caplog.text, "it is noticed")
        else:
            time.sleep(0.6)
            assert caplog.messages == []
    finally:
        watchdog.stop()


def _waiting(collect: Callable[..., object], released: threading.Event) -> Callable[..., object]:
    def waiting(*arguments: object) -> object:
        released.wait(60.0)
        return collect(*arguments)

    return waiting
