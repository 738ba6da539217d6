"""Which engines a command starts, and where: what `serve` would do on one host of the topology."""

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.aot.accelerators import Topology, parse_topology
from jdisagg.aot.check import Question, check
from jdisagg.aot.command import Effort
from jdisagg.aot.planned import planned_engines
from jdisagg.core.config import Config, DeviceConfig, LocalConfig, ModelConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from tests.unit.aot.test_budget import MODELS


def test_engines_take_the_devices_that_serve_would_give_them() -> None:
    local = Config(local=LocalConfig(num_prefill=1, num_decode=2, prefill_tp=2))
    shared = planned_engines(replace(local, device=DeviceConfig(devices="0-1")), parse_topology("h200:4"))
    apart = planned_engines(replace(local, device=DeviceConfig(devices="0-3")), parse_topology("h200:4"))
    assert [each.devices for each in shared] == [(0, 1), (0,), (1,)]
    assert [each.devices for each in apart] == [(0, 1), (2,), (3,)]
    colocated = planned_engines(replace(local, role="colocated"), parse_topology("v6e:2x2"))
    assert [(each.role, each.devices) for each in colocated] == [(Role.PREFILL, (0, 1)), (Role.DECODE, (2,))]
    both = Config(role="colocated")
    for on_one in (both, replace(both, device=DeviceConfig(devices="0"))):
        assert [each.devices for each in planned_engines(on_one, parse_topology("h200:1"))] == [(0,), (0,)]
    with pytest.raises(ConfigError, match="got 1 devices, wanted 3"):
        planned_engines(replace(local, role="colocated", device=DeviceConfig(devices="0")), parse_topology("h200:1"))
    with pytest.raises(ConfigError, match="8 devices are wanted, --topology v6e:2x2 has 4"):
        planned_engines(Config(role="unified", model=ModelConfig(tensor_parallel_size=8)), parse_topology("v6e:2x2"))
    with pytest.raises(ConfigError, match="--role router: has no engine"):
        planned_engines(Config(role="router"), parse_topology("v6e:2x2"))


def fleet(prefill_tp: int, decode_tp: int, devices: str | None = None, num_decode: int = 1) -> Config:
    both = LocalConfig(num_prefill=1, num_decode=num_decode, prefill_tp=prefill_tp, decode_tp=decode_tp)
    return Config(role="local", local=both, device=DeviceConfig(devices=devices))


@pytest.mark.parametrize(
    ("config", "topology", "devices"),
    [
        (fleet(4, 4), "v6e:2x4", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (fleet(1, 4), "v6e:2x4", [(4,), (0, 1, 2, 3)]),
        (fleet(3, 1), "v6e:2x4", [(0, 1, 2), (4,)]),  # of a block of four, three
        (fleet(1, 1, devices="2-3"), "v6e:2x4", [(2,), (3,)]),
        (fleet(2, 1, num_decode=2), "v5e:4x4", [(0, 1), (2,), (3,)]),
        (fleet(1, 1), "tpu7x:2x2x1", [(0,), (2,)]),  # half a chip each, on chips of their own
    ],
)
def test_workers_of_one_tpu_host_have_chips_of_their_own(config: Config, topology: str, devices: list[tuple[int, ...]]) -> None:
    assert [each.devices for each in planned_engines(config, parse_topology(topology))] == devices


@pytest.mark.parametrize(
    ("config", "topology", "message"),
    [
        (fleet(1, 1), "v6e:1x1", "the workers want 2 TPU chips, and there are 1; a chip serves one process"),
        (fleet(1, 1, devices="0"), "v6e:2x2", "the workers want 2 TPU chips, and there are 1"),
        (fleet(2, 1, devices="0-1", num_decode=2), "v6e:2x2", "the workers want 4 TPU chips, and there are 2"),
        (fleet(1, 1, devices="0-1"), "tpu7x:2x2x1", "the workers want 2 TPU chips, and there are 1"),
        (fleet(4, 4), "v5p:2x2x2", r"want 8 TPU chips, and there are 4; .* \(on v5p:2x2x1, a host of --topology v5p:2x2x2\)"),
        (
            Config(role="unified", device=DeviceConfig(devices="0-2")),
            "v6e:2x4",
            "3 TPU chips, wanted 1, 2, 4 or all 8",
        ),
        (
            Config(role="colocated", device=DeviceConfig(devices="0-2")),
            "v6e:2x4",
            "3 TPU chips, wanted 1, 2, 4 or all 8",
        ),
    ],
)
def test_chips_that_serve_would_not_hand_out_are_refused(config: Config, topology: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_engines(config, parse_topology(topology))


@pytest.mark.parametrize(
    ("tp", "topology", "message"),
    [
        (16, "v5e:4x4", "16 devices are wanted, a host of --topology v5e:4x4 has 4; .* runs on one host, which has 8 at most"),
        (
            8,
            "v5e:4x4",
            "8 devices are wanted, a host of --topology v5e:4x4 has 4; .* or name v5e:2x4: a worker runs",
        ),
        (8, "v5p:2x2x2", "8 devices are wanted, a host of --topology v5p:2x2x2 has 4; .* which has 4 at most"),
        (8, "v5p:2x2x1", "8 devices are wanted, --topology v5p:2x2x1 has 4; .* which has 4 at most"),
        (16, "tpu7x:2x2x2", "16 devices are wanted, a host of --topology tpu7x:2x2x2 has 8; .* which has 8 at most"),
        (16, "h100:16", "16 devices are wanted, a host of --topology h100:16 has 8; .* which has 8 at most"),
    ],
)
def test_an_engine_over_several_hosts_is_refused(tp: int, topology: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size: {message}"):
        planned_engines(Config(role="unified", model=ModelConfig(tensor_parallel_size=tp)), parse_topology(topology))


def test_colocated_engines_over_several_hosts_are_refused() -> None:
    config = Config(role="colocated", model=ModelConfig(tensor_parallel_size=4))
    assert [each.devices for each in planned_engines(config, parse_topology("v6e:2x4"))] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.raises(ConfigError, match="8 devices are wanted, a host of --topology v5p:2x2x2 has 4"):
        planned_engines(config, parse_topology("v5p:2x2x2"))


@pytest.mark.parametrize(
    ("tp", "topology"), [(8, "v6e:2x4"), (8, "tpu7x:2x2x1"), (4, "v5p:2x2x2"), (4, "v5e:4x4"), (8, "h200:8"), (16, "cpu:16")]
)
def test_an_engine_may_have_all_of_a_host(tp: int, topology: str) -> None:
    config = Config(role="unified", model=ModelConfig(tensor_parallel_size=tp))
    (planned,) = planned_engines(config, parse_topology(topology))
    assert planned.devices == tuple(range(tp))


def test_the_compiler_is_asked_about_one_host_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(topology: Topology, count: int) -> list[Any]:
        raise ConfigError(f"{topology}, {count}")

    monkeypatch.setattr("jdisagg.aot.check.abstract_devices", stop)
    model = ModelConfig(model=str(MODELS / "llama3-8b.json"), tensor_parallel_size=4)
    effort = Effort(compile=True, all_executables=False, all_layers=False)
    config, topology = Config(role="unified", model=model), parse_topology("v5e:4x4")
    with pytest.raises(ConfigError, match=r"^v5e:2x2, 4$"):
        check(Question(config=config, topology=topology, effort=effort, progress=lambda text: None))
