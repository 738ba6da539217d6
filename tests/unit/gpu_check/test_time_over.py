"""Sections whose time runs out: what hangs is not waited for, what matters most came first."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import pytest
from bench_kit.child import child
from gpu_kit import decode_section, hazard_section, kernel_section, moving_section, offers, prefill_section
from gpu_kit.findings import Clock, Findings
from gpu_kit.setting import FULL, Setting
from gpu_kit.targets import DECODE, HANDOFF, OF_TCP, PREFILL
from transfer_bench.bare import RawTcp

SAYS_NOTHING = methodcaller("poll", 600.0)  # of its pipe
HANGS = ("-c", "import time; time.sleep(600)")


def setting(tmp_path: Path, left_s: float) -> Setting:
    (tmp_path / "logs").mkdir(exist_ok=True)
    return Setting(name="s", out=tmp_path, scratch=tmp_path, small=True, clock=Clock(left_s))


def test_no_kernel_is_tried_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    for name in ("_attend", "_write", "_pages", "_tokens"):
        monkeypatch.setattr(kernel_section, name, lambda *_, name=name: tried.append(name))
    kernel_section.run(setting(tmp_path, 0.0), Findings(tmp_path / "f.json"))
    assert not tried
    assert (tmp_path / "f.json").read_text().count('"out of time"') >= 6


@pytest.mark.timeout(300)
def test_every_cold_process_ends_when_the_first_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen] = []

    def start(command: list[str], **options: object) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, *HANGS], stdout=subprocess.PIPE, text=True))
        return started[-1]

    hangs, ours = setting(tmp_path, 0.5), hazard_section.subprocess
    monkeypatch.setattr(hazard_section, "subprocess", type("Fake", (), {"Popen": staticmethod(start), "PIPE": ours.PIPE}))
    with pytest.raises(subprocess.TimeoutExpired), hazard_section._cold(hangs) as cold:
        hazard_section._same_bits(cold, hangs, Findings(tmp_path / "f.json"))
    assert [process.poll() for process in started] == [-9, -9]


def test_transfers_that_may_end_the_process_come_when_all_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("_donated", "_deleted", "_error_array", "_same_bits", "_transfers"):
        monkeypatch.setattr(hazard_section, name, lambda *_, name=name: told.append(name))
    hazard_section.run(setting(tmp_path, 20.0), Findings(tmp_path / "f.json"))
    assert told[-1] == "_transfers"
    assert len(told) == 5


@pytest.mark.timeout(300)
def test_a_process_that_says_nothing_is_given_up_after_the_time_that_is_granted() -> None:
    with pytest.raises(RuntimeError, match=r"has not answered within 0\.2 s"), child(SAYS_NOTHING, start_s=0.2):
        pytest.fail("it has said nothing")


@pytest.mark.timeout(300)
def test_the_yardstick_does_not_wait_for_bytes_of_a_process_that_is_gone() -> None:
    plain = RawTcp(1024)
    try:
        plain.move(1)
        plain._producer.tell("not a number")  # it fails, and its socket closes
        with pytest.raises(ConnectionError):
            plain._obtain(1)
    finally:
        plain.close()


def test_what_has_a_target_is_measured_first() -> None:
    assert moving_section.BACKENDS[0] == "jax"
    assert "over jax" in HANDOFF.name
    first = f"batch {FULL.decode.batches[0]}, context {FULL.decode.contexts[0]}:"
    assert first == f"batch {decode_section.TARGET_BATCH}, context {decode_section.TARGET_CONTEXT}:"
    assert first in DECODE.name
    assert FULL.prefill_tokens[0] == prefill_section.TARGET_TOKENS
    assert f"{prefill_section.TARGET_TOKENS} tokens" in PREFILL.name


def test_a_target_is_told_before_the_next_part_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = tmp_path / "f.json", dict[str, bool]()

    def between(backend: str, _setting: Setting, rates: dict[str, float], findings: Findings, **changed: object) -> None:
        findings.row("rates", backend=backend)
        told[f"{backend} {changed}"], rates[backend] = HANDOFF.name in path.read_text(), 6.0

    monkeypatch.setattr(moving_section, "_between", between)
    monkeypatch.setattr(moving_section, "_on_device", lambda *_: None)
    monkeypatch.setattr(moving_section, "keep_freed_memory", lambda _: True)
    moving_section.run(setting(tmp_path, 20.0), Findings(path))
    wide, unsummed = "jax {'window': 8}", "jax {'checksums': False}"
    assert told == {"jax {}": False, "grpc {}": True, "shm {}": True, wide: True, unsummed: True}


@pytest.mark.parametrize("left_s", [moving_section.LEAST_S - 1.0, moving_section.LEAST_S + 60.0])
def test_a_hand_off_that_would_only_run_out_of_time_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float
) -> None:
    path, began = tmp_path / "f.json", list[str]()
    for name in ("_plain", "_between", "_on_device"):
        monkeypatch.setattr(moving_section, name, lambda *_, name=name, **__: began.append(name))
    monkeypatch.setattr(moving_section, "keep_freed_memory", lambda _: True)
    moving_section.run(replace(setting(tmp_path, left_s), small=False), Findings(path))
    found = json.loads(path.read_text())
    late = left_s < moving_section.LEAST_S
    assert began == ["_plain", "_between"] + ([] if late else [*["_between"] * 2, "_on_device", *["_between"] * 2])
    assert set(found["left_out"].values()) == ({"out of time"} if late else set())
    assert not found["checks"]


def test_the_plain_socket_receives_into_memory_as_a_worker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("keep_freed_memory", "_plain", "_between", "_on_device"):
        monkeypatch.setattr(moving_section, name, lambda *_, name=name, **__: told.append(name))
    moving_section.run(setting(tmp_path, 20.0), Findings(tmp_path / "f.json"))
    assert told[:2] == ["keep_freed_memory", "_plain"]


def test_a_share_of_what_was_not_measured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    monkeypatch.setattr(moving_section, "keep_freed_memory", lambda _: True)
    monkeypatch.setattr(moving_section, "_plain", lambda *_: 1 / 0)
    monkeypatch.setattr(moving_section, "_between", lambda backend, _setting, rates, *_, **__: rates.update({backend: 6.0}))
    monkeypatch.setattr(moving_section, "_on_device", lambda *_: None)
    moving_section.run(setting(tmp_path, 20.0), Findings(path))
    [target] = [one for one in json.loads(path.read_text())["targets"] if one["name"] == OF_TCP.name]
    assert (target["verdict"], target["why"]) == ("not run", "no plain TCP")


def test_a_gpu_by_either_of_its_names_is_offered_what_a_gpu_runs() -> None:
    assert offers.implementations("cuda") == offers.implementations("gpu") == ["ref", "gpu"]
