"""A real router process without workers: READY, its edges, its end."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet_process import free_port, release_port
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.api.fleet.codec import encode_member
from jdisagg.api.http.version import package_version
from jdisagg.serve.ready import Ready, parse
from jdisagg.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2, fleet_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.unit.wire.rig import member

SERVE = [sys.executable, "-m", "jdisagg.serve"]
WAIT_S = 90.0


@pytest.fixture
def router() -> Iterator[tuple[subprocess.Popen[str], Ready]]:
    process = subprocess.Popen(
        [*SERVE, "--role", "router", "--served-model-name", "m"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    ready = parse(process.stdout.readline())
    assert ready is not None
    yield process, ready
    process.kill()
    process.wait(WAIT_S)
    process.stdout.close()


@pytest.fixture
def port() -> Iterator[int]:
    """That nobody else gets until the router listens there."""
    free = free_port()
    yield free
    release_port(free)


def get(address: str | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_router_without_workers_is_healthy_but_not_ready_and_sigterm_ends_it_with_zero(router) -> None:
    process, ready = router
    assert (ready.role, ready.model, ready.pid) == ("router", "m", process.pid)
    assert get(ready.http, "/health")[0] == 200
    status, body = get(ready.http, "/ready")
    assert status == 503
    assert "no decode or unified worker" in body
    shown = get(ready.http, "/metrics")[1]
    assert re.search(rf'^jdisagg_build_info{{device_kind="",model="m",.*version="{package_version()}"}} 1', shown, re.MULTILINE)
    assert "jdisagg_event_loop_late_seconds_bucket" in shown
    with grpc.insecure_channel(ready.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert "jdisagg_ready 0.0" in get(ready.http, "/metrics")[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_the_build_of_a_router_names_the_model_as_its_workers_do_once_one_has_told_and_not_as_its_own_path_any_more() -> None:
    """Else two routers of a fleet that were given the same files by other paths part in every panel."""
    with subprocess.Popen(
        [*SERVE, "--role", "router"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        ready = parse(process.stdout.readline())
        assert ready is not None
        assert ready.grpc is not None
        try:
            assert models_told(ready.http) == [ready.model]
            with grpc.insecure_channel(ready.grpc) as channel:
                worker = encode_member(member(address="127.0.0.1:9", name="of-the-workers"))
                fleet_pb2_grpc.FleetServiceStub(channel).Register(fleet_pb2.RegisterRequest(member=worker), timeout=30)
            assert models_told(ready.http) == ["of-the-workers"]
            assert '"id":"of-the-workers"' in get(ready.http, "/v1/models")[1].replace(" ", "")
        finally:
            process.kill()


def test_a_client_with_a_wrong_key_is_in_the_log_of_a_router() -> None:
    environ = os.environ | {"JDISAGG_API_KEY": "a-good-one-of-this-fleet"}
    command = [*SERVE, "--role", "router"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        ready = parse(process.stdout.readline())
        assert ready is not None
        try:
            assert [get(ready.http, "/v1/models")[0] for _ in range(3)] == [401] * 3
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read().count("a call of /v1/models from 127.0.0.1 was refused (401)") == 1


def models_told(address: str | None) -> list[str]:
    return re.findall(r'^jdisagg_build_info{.*model="([^"]*)"', get(address, "/metrics")[1], re.MULTILINE)


def test_a_router_ends_when_told_while_it_still_fetches_its_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # takes connections and answers nothing
        hub.settimeout(WAIT_S)
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [*SERVE, "--role", "router", "--model", "owner/name"]
        environ = os.environ | settings | {"no_proxy": "*"}
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = hub.accept()
            process.send_signal(signal.SIGTERM)
            with connection:
                _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert "ended before it was ready; no request was lost" in said


def test_a_router_that_drains_hangs_up_on_clients_that_keep_their_connection(router) -> None:
    _, ready = router
    client = http.client.HTTPConnection(*ready.http.split(":"), timeout=30)

    def kept() -> bool:
        client.request("GET", "/ready")
        with client.getresponse() as answer:
            answer.read()
        return client.sock is not None

    assert kept()
    with grpc.insecure_channel(ready.grpc) as channel:
        admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=30)
    assert not kept()


def test_a_router_counts_bad_calls_and_has_no_prefix_cache_to_reset(router) -> None:
    _, ready = router
    bad = urllib.request.Request(f"http://{ready.http}/v1/completions", data=b"{", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(bad, timeout=30)
    caught.value.close()
    assert 'jdisagg_requests_finished_total{reason="invalid"} 1.0' in get(ready.http, "/metrics")[1]
    with grpc.insecure_channel(ready.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_a_router_computes_nothing_for_pages_of_which_no_browser_asks(router) -> None:
    _, ready = router
    headers = {"Origin": "https://page.example", "Content-Type": "text/plain"}
    foreign = urllib.request.Request(f"http://{ready.http}/v1/completions", b'{"prompt": "a"}', headers, method="POST")
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        urllib.request.urlopen(foreign, timeout=30)
    caught.value.close()


def test_a_router_without_workers_is_unavailable_when_asked_for_its_model(router) -> None:
    _, ready = router
    with grpc.insecure_channel(ready.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        generation_pb2_grpc.GenerationServiceStub(channel).GetModel(generation_pb2.GetModelRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, refused.value  # type: ignore[attr-defined]
    assert refused.value.details().startswith("no worker that decodes has registered with this router yet")  # type: ignore[attr-defined]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_process_without_standard_streams_serves_and_drains(closed: tuple[int, ...], port: int) -> None:
    shut = "".join(f"os.close({number}); " for number in closed)
    code = f"import os, sys; {shut}os.execv(sys.executable, {[*SERVE, '--role', 'router', '--port', str(port)]!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until_answered(f"127.0.0.1:{port}", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_a_process_whose_starter_reads_nothing_serves_and_drains(port: int) -> None:
    command = [*SERVE, "--role", "router", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        until_answered(f"127.0.0.1:{port}", process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, said
    assert "READY could not be said on stdout: Broken pipe" in said
    assert "Traceback" not in said


def until_answered(address: str, process: subprocess.Popen[Any]) -> None:
    """Wait for /health."""
    began_s = time.monotonic()
    while True:
        try:
            assert get(address, "/health")[0] == 200
            return
        except urllib.error.URLError:
            assert process.poll() is None
            assert time.monotonic() - began_s < WAIT_S
            time.sleep(0.05)


def exits(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [*SERVE, *flags], capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, **(env or {})}, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_a_taken_port_exits_2_with_one_line_that_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, text = exits("--role", "router", "--port", str(taken.getsockname()[1]))
    assert status == 2
    assert "--port: cannot listen on 127.0.0.1" in text.splitlines()[-1]


def test_a_taken_grpc_port_exits_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, text = exits("--role", "router", "--grpc-port", str(taken.getsockname()[1]))
    assert status == 2
    assert "--grpc-port: cannot listen on 127.0.0.1" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "env", "wanted"),
    [
        (["--pagesize", "3"], {}, "jdisagg.serve: --pagesize: unknown flag; did you mean --page-size?\n"),
        (["--role", "router", "--model", "./nowhere"], {}, "--model: ./nowhere is not a directory"),
        (["--role", "router", "--host", "203.0.113.7"], {}, "--host: 203.0.113.7 is not an address of this machine"),
        (["--role", "router", "--host", "[::1]"], {}, "write it without brackets"),
        (["--role", "router", "--host", "256.1.1.1"], {}, "--host: 256.1.1.1 is not an address of this machine"),
        (["--role", "router", "--cpu-affinity", "4000"], {}, "--cpu-affinity: got '4000', wanted cores out of "),
        (["--role", "router"], {"JDISAGG_LOG_LEVEL": "loud"}, "JDISAGG_LOG_LEVEL: got 'loud'"),
    ],
)
def test_a_bad_configuration_exits_2_with_one_line(flags: list[str], env: dict[str, str], wanted: str) -> None:
    status, text = exits(*flags, env=env)
    assert status == 2
    assert text.count("\n") == 1
    assert wanted in text


@pytest.mark.parametrize("role", ["serve", "router"])
def test_what_ends_the_start_is_a_record_of_the_log_in_both_formats(role: str) -> None:
    """`serve`: it is not known yet which role it would be."""
    flags = ("--pagesize", "3") if role == "serve" else ("--role", "router", "--model", "./nowhere")
    wanted = (
        "--pagesize: unknown flag; did you mean --page-size?" if role == "serve" else "--model: ./nowhere is not a directory"
    )
    status, text = exits(*flags)
    assert status == 2
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\S+ C {role}\[\d+\] jdisagg\.serve: {re.escape(wanted)}.*\n", text)
    status, text = exits(*flags, env={"JDISAGG_LOG_FORMAT": "json"})
    assert status == 2
    found = json.loads(text)
    assert (found["level"], found["role"], found["logger"]) == ("critical", role, "jdisagg.serve")
    assert found["message"].startswith(wanted)


def test_help_and_print_config_and_the_router_import_no_jax() -> None:
    code = (
        "import sys, runpy; sys.argv = ['serve', '--print-config']\n"
        "import jdisagg.serve.router, jdisagg.serve.local\n"
        "try: runpy.run_module('jdisagg.serve', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules), 'jax was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert 'role = "local"' in done.stdout


def test_the_version_is_told_without_a_start() -> None:
    done = subprocess.run([*SERVE, "--version"], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == f"jdisagg {package_version()}\n"


@pytest.mark.parametrize(("error", "status"), [("ConfigError", 2), ("NoMemory", 1)])
def test_what_may_pass_by_itself_is_no_bad_configuration_to_a_supervisor(error: str, status: int) -> None:
    code = (
        "import sys\nfrom jdisagg.core.errors import ConfigError, NoMemory\nfrom jdisagg.serve import __main__ as serve\n"
        f"def fails(argv): raise {error}('--model: no room')\n"
        "serve._run = fails\nsys.exit(serve.main([]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert "C serve[" in done.stderr
    assert done.stderr.endswith("jdisagg.serve: --model: no room\n")
