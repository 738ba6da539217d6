"""The supervisor over fake children, each a real process."""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jdisagg.core.config import Config, DeviceConfig, LocalConfig, ServerConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import load_config
from jdisagg.serve.local import router_spec, split_devices, worker_specs
from jdisagg.serve.ready import Ready
from tests.unit.waiting import until

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0


class Fleet:
    """One supervisor process and the notes of its children."""

    def __init__(self, directory: Path, mode: str, *flags: str) -> None:
        self.events_path = directory / "events"
        self.log = directory / "log"
        env = {**os.environ, "FAKE_DIR": str(directory), "FAKE_MODE": mode, "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fake_fleet.py")), "--drain-s", "0.5", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
            )

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(WAIT_S), self.log.read_text()
        return json.loads(self.process.stdout.readline())

    def events(self, *wanted: str) -> list[list[str]]:
        """Noted events as [time, event, role, pid, argv..], those whose "event role" is wanted."""
        lines = self.events_path.read_text().splitlines() if self.events_path.exists() else []
        return [line.split() for line in lines if " ".join(line.split()[1:3]) in wanted]

    def pids(self) -> list[int]:
        return [int(fields[3]) for fields in (line.split() for line in self.events_path.read_text().splitlines())]

    def wait(self) -> int:
        return self.process.wait(WAIT_S)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def start(mode: str = "", *flags: str) -> Fleet:
        made.append(Fleet(tmp_path, mode, *flags))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait(WAIT_S)
        assert one.process.stdout is not None
        one.process.stdout.close()
        until(lambda one=one: not any(map(alive, one.pids())), "children outlived their supervisor")


def test_ready_names_the_router_and_every_worker(fleet) -> None:
    ready = fleet("", "--num-prefill", "2").ready()
    assert [worker["role"] for worker in ready["workers"]] == ["router", "prefill", "prefill", "decode"]
    assert ready["role"] == "local"
    assert ready["http"] == ready["workers"][0]["http"]
    assert ready["executables"] == 6
    assert len({worker["pid"] for worker in ready["workers"]}) == 4


def test_sigterm_ends_router_then_decode_then_prefill_and_exits_zero(fleet) -> None:
    one = fleet()
    one.ready()
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 0
    noted = [line.split() for line in one.events_path.read_text().splitlines()]
    stopped = sorted((fields for fields in noted if fields[1] == "stopped"), key=lambda fields: float(fields[0]))
    assert [fields[2] for fields in stopped] == ["router", "decode", "prefill"]


def test_children_have_their_share_of_the_cores_but_no_part_in_a_ctrl_c(fleet) -> None:
    one = fleet()
    pids = [worker["pid"] for worker in one.ready()["workers"]]
    assert {os.getsid(pid) for pid in pids} == {os.getsid(one.process.pid)}, "sessions are scheduled one against the other"
    assert [os.getpgid(pid) for pid in pids] == pids


@pytest.mark.parametrize("role", ["decode", "router"])
def test_a_killed_child_is_started_again_with_the_same_flags(fleet, role: str) -> None:
    one = fleet()
    ready = one.ready()
    (victim,) = [worker for worker in ready["workers"] if worker["role"] == role]
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: len(one.events(f"started {role}")) == 2, f"{role} was not started again")
    first, second = one.events(f"started {role}")
    assert second[3] != first[3]
    assert float(second[0]) - float(first[0]) >= 0.5
    if role == "decode":
        assert second[4:] == first[4:]
    else:
        assert " ".join(second[4:]).count(victim["http"].rpartition(":")[2]) == 2  # --port and --grpc-port of the first run
    assert len(one.events("started prefill")) == 1
    again = re.compile(rf"{role}.*: ready again as pid {second[3]}, HTTP on \S+:\d+, gRPC on ")
    until(lambda: again.search(one.log.read_text()) is not None, "nobody knows where to scrape it")
    assert "prefill-0: ready again" not in one.log.read_text()


@pytest.mark.parametrize(("number", "level"), [(signal.SIGTERM, " I local"), (signal.SIGKILL, " W local")])
def test_a_child_that_was_told_to_end_is_no_warning(fleet, number: int, level: str) -> None:
    one = fleet()
    (victim,) = [worker for worker in one.ready()["workers"] if worker["role"] == "decode"]
    os.kill(victim["pid"], number)
    until(lambda: len(one.events("started decode")) == 2, "decode was not started again")
    (told,) = [line for line in one.log.read_text().splitlines() if "decode-0: " in line and "starting it again in" in line]
    assert level in told
    assert ("ended as it was told to" in told) == (number == signal.SIGTERM)


def test_every_line_of_a_fleet_is_json_where_that_is_wanted(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JDISAGG_LOG_FORMAT", "json")
    one = fleet()
    ready = one.ready()
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 0
    records = [json.loads(line) for line in one.log.read_text().splitlines()]
    assert {record.get("process") for record in records} == {None, *(f"{role}-0" for role in ("prefill", "decode")), "router"}
    assert {record["pid"] for record in records if record.get("process") is None} == {one.process.pid}, ready


def test_a_worker_that_crashes_while_starting_is_tried_again(fleet) -> None:
    one = fleet("crash-once")
    assert one.ready()["role"] == "local"
    assert len(one.events("started decode")) == 2
    assert "decode-0: exited with 3; starting it again in 0.5 s" in one.log.read_text()


def test_a_worker_that_never_comes_up_ends_the_fleet(fleet) -> None:
    one = fleet("crash")
    assert one.wait() == 1
    assert "decode-0 exited with 3 before it was ready, 3 times" in one.log.read_text()
    assert not any(map(alive, one.pids()))


def test_a_bad_configuration_of_a_child_is_not_retried(fleet) -> None:
    one = fleet("bad-config")
    assert one.wait() == 2
    assert len(one.events("started decode")) == 1
    assert "decode-0 refuses its configuration" in one.log.read_text()


def test_sigkill_of_the_supervisor_leaves_no_child(fleet) -> None:
    one = fleet()
    one.ready()
    pids = one.pids()
    assert len(pids) == 3
    assert all(map(alive, pids))
    one.process.kill()
    until(lambda: not any(map(alive, pids)), "a child outlived its supervisor")


def test_a_child_deaf_to_sigterm_is_killed_after_its_grace(fleet) -> None:
    one = fleet("deaf")
    one.ready()
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 1
    assert "decode-0: did not end within 5.5 s of SIGTERM; killing it" in one.log.read_text()


def test_sigterm_while_starting_ends_everything_without_waiting_for_a_drain(fleet) -> None:
    one = fleet("silent", "--drain-s", "30")
    until(lambda: len(one.events("started decode")) == 1, "decode did not start")
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 0
    assert not any(map(alive, one.pids()))


def test_a_childs_stderr_carries_its_name(fleet) -> None:
    one = fleet()
    one.ready()
    until(lambda: one.log.read_text().count("a line of the log\n") == 3, "one of the three has said nothing")
    for name in ("router", "prefill-0", "decode-0"):
        assert f"{name} | a line of the log\n" in one.log.read_text()


def test_sigusr1_shows_stacks_and_children(fleet) -> None:
    one = fleet()
    one.ready()
    one.process.send_signal(signal.SIGUSR1)
    whole = re.compile(r'^\{"event": "state".*\}$', re.MULTILINE)
    until(lambda: whole.search(one.log.read_text()) is not None, "no state on stderr")
    text = one.log.read_text()
    (line,) = whole.findall(text)
    assert set(json.loads(line)["children"]) == {"router", "prefill-0", "decode-0"}
    assert "most recent call first" in text
    assert one.process.poll() is None


def test_workers_are_commanded_to_register_and_the_keys_stay_out_of_argv() -> None:
    config = Config(
        local=LocalConfig(num_prefill=2, num_decode=1, prefill_tp=2, decode_tp=1),
        server=ServerConfig(host="0.0.0.0", port=80, api_key="k3y", client_api_key="cl1ents"),
        device=DeviceConfig(devices="0-4", cpu_affinity="0"),
    )
    specs = worker_specs(config, "127.0.0.1:9", program=())
    loaded = [load_config(spec.command(None), spec.environ) for spec in specs]
    assert [(c.role, c.model.tensor_parallel_size, c.device.devices) for c in loaded] == [
        ("prefill", 2, "0,1"),
        ("prefill", 2, "2,3"),
        ("decode", 1, "4"),
    ]
    servers = {(c.server.router, c.server.host, c.server.port, c.server.api_key, c.server.client_api_key) for c in loaded}
    assert servers == {(("127.0.0.1:9",), "127.0.0.1", 0, "k3y", "cl1ents")}
    assert {c.device.cpu_affinity for c in loaded} == {"0"}
    router = router_spec(config, program=())
    words = " ".join(word for spec in (router, *specs) for word in spec.command(None))
    assert "k3y" not in words
    assert "cl1ents" not in words
    assert load_config(router.command(None), router.environ).server == config.server
    again = load_config(router.command(Ready(role="router", http="0.0.0.0:81", grpc="0.0.0.0:82", model="m")), {})
    assert (again.server.port, again.server.grpc_port) == (81, 82)


@pytest.mark.parametrize(
    ("devices", "needs", "wanted"),
    [
        (None, [1, 1], [None, None]),
        ("0", [1, 1], ["0", "0"]),
        ("2-5", [2, 1], ["2,3", "4"]),
        ("0-1", [2, 1], ["0,1", "0"]),
        ("0-3", [1] * 8, list("01230123")),
        ("4-6", [2, 2], ["4,5", "6,4"]),
    ],
)
def test_devices_are_split_when_there_are_enough_and_shared_otherwise(devices, needs, wanted) -> None:
    assert split_devices(devices, needs) == wanted


def test_too_few_devices_for_one_worker_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--devices: got '0' \\(1 devices\\), wanted at least 2"):
        split_devices("0", [2, 1])


def test_tensor_parallel_size_holds_for_both_kinds_unless_one_says_otherwise() -> None:
    config = load_config(["--tensor-parallel-size", "4", "--decode-tp", "2"], {})
    specs = worker_specs(config, "127.0.0.1:9", program=())
    assert [load_config(spec.command(None), {}).model.tensor_parallel_size for spec in specs] == [4, 2]
