"""What `--topology` may say, and what is known of the devices it names."""

import pytest

from jdisagg.aot import compilers
from jdisagg.aot.accelerators import GIB, parse_topology, read_accelerators
from jdisagg.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_devices", "compile_shape"),
    [
        ("v6e:2x4", 8, "2x4"),
        ("v5e:1x1", 1, "2x2"),  # the compiler describes whole hosts
        ("v5e", 1, "2x2"),
        ("v5p:1x2x1", 2, "2x2x1"),
        ("tpu7x:2x2x1", 8, "2x2x1"),  # two devices a chip
        ("h200:4", 4, "4"),
        ("H200", 1, "1"),
        ("h100:8", 8, "8"),
    ],
)
def test_a_topology_counts_devices_and_asks_for_whole_hosts(text: str, num_devices: int, compile_shape: str) -> None:
    topology = parse_topology(text)
    assert (topology.num_devices, topology.compile_shape) == (num_devices, compile_shape)


@pytest.mark.parametrize(
    ("text", "host", "num_devices"),
    [
        ("v5e:2x4", "v5e:2x4", 8),
        ("v6e:2x4", "v6e:2x4", 8),
        ("v6e:1x1", "v6e:1x1", 1),
        ("v5e:4x4", "v5e:2x2", 4),  # hosts of eight chips are slices of their own
        ("v6e:16x16", "v6e:2x2", 4),
        ("v5p:2x2x1", "v5p:2x2x1", 4),
        ("v5p:2x2x2", "v5p:2x2x1", 4),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),
        ("tpu7x:2x2x2", "tpu7x:2x2x1", 8),
        ("h100:8", "h100:8", 8),
        ("h200:16", "h200:8", 8),
        ("cpu:64", "cpu:64", 64),
    ],
)
def test_a_slice_has_hosts_of_so_many_devices(text: str, host: str, num_devices: int) -> None:
    topology = parse_topology(text)
    assert (str(topology.host), topology.host.num_devices) == (host, num_devices)
    assert topology.host.host == topology.host


@pytest.mark.parametrize("text", ["v9:2x2", "v6e:8", "v6e:2x2x2", "v6e:0x4", "v6e:2x", "h200:2x2", "v6e:9999x9999", ""])
def test_an_unknown_topology_is_refused_with_one_that_exists(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--topology: got .*, wanted .*(v6e:2x2|h200:1)"):
        parse_topology(text)


@pytest.mark.parametrize("text", ["v6e:3x5", "v6e:1x2", "v6e:4x2", "v5e:8x1", "v5e:16x32"])
def test_a_slice_that_nobody_rents_is_refused_with_those_that_are(text: str) -> None:
    offered = r"1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16 \(of a larger one --tp uses a part\)"
    with pytest.raises(ConfigError, match=rf"wanted a slice that v[56]e is offered in: {offered}"):
        parse_topology(text)


@pytest.mark.parametrize("text", ["v5e:8x16", "v6e:16x16", "v5p:2x2x4", "tpu7x:4x4x8", "h200:3", "cpu:3"])
def test_a_slice_that_may_be_rented_is_not(text: str) -> None:
    assert str(parse_topology(text)) == text


def test_every_host_is_a_slice_of_its_own() -> None:
    for kind in read_accelerators().values():
        assert not kind.slices or {*kind.hosts, kind.smallest} <= {*kind.slices}


def test_memory_on_a_gpu_is_the_share_that_its_allocator_takes() -> None:
    known = read_accelerators()
    assert known["v6e"].limit_bytes({"XLA_CLIENT_MEM_FRACTION": "0.5"}) == int(31.25 * GIB)
    assert known["h200"].limit_bytes({}) == int(139.8 * GIB * 0.75)
    assert known["h100"].limit_bytes({}) == int(79.1 * GIB * 0.75)
    assert known["h200"].limit_bytes({"XLA_CLIENT_MEM_FRACTION": "0.95"}) == int(139.8 * GIB * 0.95)
    assert known["cpu"].limit_bytes({}) is None
    with pytest.raises(ConfigError, match=r"XLA_CLIENT_MEM_FRACTION: got 'much', wanted a share"):
        known["h200"].limit_bytes({"XLA_CLIENT_MEM_FRACTION": "much"})


def test_every_accelerator_has_rates_for_the_default_dtype_and_a_source() -> None:
    for accelerator in read_accelerators().values():
        assert accelerator.source
        if accelerator.platform != "cpu":
            assert (
                min(accelerator.bytes_per_s or 0, accelerator.link_bytes_per_s or 0, accelerator.flops_per_s["bfloat16"]) > 1e9
            )
        if accelerator.platform == "cuda":
            assert "gpu_device_info" in accelerator.target_text()
            assert f'"{accelerator.title}' in accelerator.target_text()
            assert f"memory_bandwidth: {int(accelerator.bytes_per_s or 0)} " in accelerator.target_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v6e:2x2", r"pip install .* -e '\.\[aot\]'; or add --no-compile"),
        ("h200:1", "install jax-cuda13-plugin .* or add --no-compile"),
    ],
)
def test_a_compiler_that_is_not_installed_is_named(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        compilers.abstract_devices(parse_topology(text), 1)


def test_more_devices_than_the_topology_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 4 devices to use, --topology v5e:1x1 has 1; lower --tp"):
        compilers.abstract_devices(parse_topology("v5e:1x1"), 4)
