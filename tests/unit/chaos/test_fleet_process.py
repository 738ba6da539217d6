"""The process that drills strike: what a loop may ask of it."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fleet_process
import grpc
import pytest
from fleet_process import FleetProcess

from jdisagg.serve.ready import Ready
from tests.unit.waiting import until

LIMIT_S = 60.0


@pytest.fixture
def process(tmp_path: Path):
    one = FleetProcess("--help", log=tmp_path / "log")
    yield one
    one.close()


def test_that_a_process_has_ended_is_seen_without_reaping_it(process: FleetProcess) -> None:
    assert not process.has_ended
    process.process.kill()
    until(lambda: process.has_ended)
    assert process.process.returncode is None
    os.kill(process.process.pid, 0)  # its number is not free yet: nobody has reaped it
    assert process.process.wait(LIMIT_S) == -9
    assert process.has_ended


def test_a_process_that_somebody_else_reaped_has_ended(process: FleetProcess) -> None:
    process.process.kill()
    os.waitpid(process.process.pid, 0)
    assert process.has_ended


def test_ready_is_seen_behind_a_line_that_a_library_wrote_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = Ready(role="decode", http=None, grpc="127.0.0.1:1", model="demo")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' 'a remark' '{ready.line()}'\nsleep {LIMIT_S:g}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    one = FleetProcess(log=tmp_path / "log")
    try:
        assert one.wait_ready(LIMIT_S) == ready
    finally:
        one.close()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Given; there is no other."""
    port = fleet_process.free_port()
    monkeypatch.setattr(fleet_process, "PORTS", range(port, port + 1))
    return port


def test_a_port_is_given_once_until_it_is_released(port: int) -> None:
    with pytest.raises(RuntimeError, match="is taken"):
        fleet_process.free_port()
    fleet_process.release_port(port)
    assert fleet_process.free_port() == port


def test_on_a_port_that_was_given_nobody_listens_but_the_server_it_was_given_for(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((fleet_process.HOST, port), LIMIT_S)
    server = grpc.server(ThreadPoolExecutor(1), options=(("grpc.so_reuseport", 0),))
    assert server.add_insecure_port(f"{fleet_process.HOST}:{port}") == port
    server.start()
    socket.create_connection((fleet_process.HOST, port), LIMIT_S).close()
    server.stop(None).wait(LIMIT_S)
