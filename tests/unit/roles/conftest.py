"""Fixtures of tests that step their engines by hand: no engine waits for what only the test can send it."""

from __future__ import annotations

import pytest

from jdisagg.roles import engine_loop


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine does not wait for messages."""
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)


@pytest.fixture
def no_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that waits for a step that computes prompts."""
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)
