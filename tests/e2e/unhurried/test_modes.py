"""One program, one set of flags: `--role` alone decides whether it serves both phases, the first, or the second."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import Start

ROLES = ("unified", "prefill", "decode")
ASKED = Asked(prompt=tuple(range(20, 50)), sampling={"max_tokens": 12, "temperature": 0.0, "ignore_eos": True})


@pytest.mark.covers("P08")
def test_every_mode_starts_from_the_same_flags(start: Start, exact_flags: tuple[str, ...]) -> None:
    servers = {role: start(role, "--role", role, *exact_flags).wait_ready() for role in ROLES}
    assert {role: server.ready.role for role, server in servers.items()} == {role: role for role in ROLES}
    for server in servers.values():
        assert server.get("/ready")[0] == 200
    (both,), (second,) = (run_all(servers[role].grpc, [ASKED]) for role in ("unified", "decode"))
    assert both.error is None
    assert len(both.tokens[0]) == 12
    assert second.essence() == both.essence()  # no peer was named: it computed the prompt itself
    (first,) = run_all(servers["prefill"].grpc, [ASKED])
    assert "ask a decode worker or the router" in str(first.error), "a prefill worker takes no clients"
    status, answer = servers["prefill"].post("/v1/completions", {"prompt": "x"})
    assert status == 404
    assert "ask a decode worker or the router" in answer["error"]["message"]
    assert [server.stop() for server in servers.values()] == [0, 0, 0]


@pytest.mark.covers("P08")
def test_the_modes_differ_in_nothing_but_their_name(exact_flags: tuple[str, ...]) -> None:
    printed = {}
    for role in ROLES:
        command = [sys.executable, "-m", "jdisagg.serve", "--role", role, *exact_flags, "--print-config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
        head, _, rest = done.stdout.partition("\n")
        assert head == f'role = "{role}"'
        assert done.stderr == ""
        printed[role] = rest
    assert printed["unified"] == printed["prefill"] == printed["decode"]
    assert 'numerics = "exact"' in printed["unified"]
