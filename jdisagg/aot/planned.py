"""The engines that a configuration starts on a topology, and meshes for arithmetic over devices that nobody described.

A planned device has a platform and a number: enough to lay out weights and cache, which needs no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jdisagg.aot.accelerators import Topology
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.core.values import parse_ranges
from jdisagg.models.sharding import make_mesh
from jdisagg.serve.local import split_devices
from jdisagg.serve.tpu import TpuHost, claim_chips, share_chips


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedEngine:
    """One engine of a deployment."""

    role: Role
    tp: int
    devices: tuple[int, ...]  # of the topology, in JAX's order


@dataclass(frozen=True, slots=True)
class _Device:
    """What `Mesh` and the layouts look at."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0


def planned_engines(config: Config, topology: Topology) -> list[PlannedEngine]:
    """Every engine that `serve` would start, all on one host of `topology`. Raises ConfigError for a role without one, or
    devices that are not there."""
    tp, tp_p, tp_d = config.model.tensor_parallel_size, config.prefill_tp, config.decode_tp
    if config.role == "router":
        raise ConfigError("--role router: has no engine; name the role of a worker")
    if config.role == "local":
        wanted = [(Role.PREFILL, tp_p)] * config.local.num_prefill + [(Role.DECODE, tp_d)] * config.local.num_decode
    elif config.role == "colocated":
        wanted = [(Role.PREFILL, tp_p), (Role.DECODE, tp_d)]
    else:
        wanted = [(Role(config.role), tp)]
    host = topology.host
    try:
        shares = _shares(config, [size for _, size in wanted], host)
    except ConfigError as error:
        if host == topology:
            raise
        raise ConfigError(f"{error.message} (on {host}, a host of --topology {topology})") from error
    engines = [PlannedEngine(role=role, tp=size, devices=share) for (role, size), share in zip(wanted, shares, strict=True)]
    needed = 1 + max(max(engine.devices) for engine in engines)
    if needed > host.num_devices:
        raise ConfigError(_too_few(config, needed, topology))
    return engines


def planned_mesh(platform: str, tp: int) -> Mesh:
    """A mesh of `tp` devices that exist on paper."""
    devices: list[Any] = [_Device(index, "gpu" if platform == "cuda" else platform, "planned") for index in range(tp)]
    return make_mesh(devices, tp)


def _too_few(config: Config, needed: int, topology: Topology) -> str:
    flag = "--devices" if config.device.devices is not None else "--tensor-parallel-size"
    host, largest = topology.host, topology.accelerator.largest_host
    where = f"--topology {topology}" if host == topology else f"a host of --topology {topology}"
    if largest is not None and needed > largest.num_devices:
        advice = f"lower it (--tp): a worker runs on one host, which has {largest.num_devices} at most"
    elif host == topology:
        advice = "lower it (--tp), or name a larger topology"
    else:
        advice = f"lower it (--tp), or name {largest}: a worker runs on one host"
    return f"{flag}: {needed} devices are wanted, {where} has {host.num_devices}; {advice}"


def _shares(config: Config, needs: Sequence[int], host: Topology) -> list[tuple[int, ...]]:
    """Devices of each engine, as `serve` hands them out on such a host."""
    named, tpu = config.device.devices, _tpu(host)
    shares: Sequence[str | None]
    if config.role == "local" and tpu is not None:
        shares = share_chips(tpu, named, needs, {})
    else:
        claim_chips(config, {}, tpu)  # for its refusal of chips that libtpu shows to no process
        if config.role == "colocated":
            return _of_one_process(named, needs, host.num_devices)
        shares = split_devices(named, needs)
    return [
        tuple(range(need)) if share is None else tuple(parse_ranges(share, "--devices")[:need])
        for share, need in zip(shares, needs, strict=True)
    ]


def _tpu(host: Topology) -> TpuHost | None:
    """What `serve` would find there."""
    accelerator = host.accelerator
    if accelerator.platform != "tpu":
        return None
    return TpuHost(num_chips=host.num_chips, devices_per_chip=accelerator.devices_per_chip)


def _of_one_process(named: str | None, needs: Sequence[int], num_devices: int) -> list[tuple[int, ...]]:
    """Devices of colocated engines: their own, or the only one for both."""
    indices = parse_ranges(named, "--devices") if named is not None else range(sum(needs))
    if list(needs) == [1, 1] and (num_devices if named is None else len(indices)) == 1:
        return [(indices[0],)] * 2
    if len(indices) < sum(needs):
        raise ConfigError(
            f"--devices: got {len(indices)} devices, wanted {sum(needs)}, {needs[0]} for prefill and {needs[1]} for decode"
        )
    return [tuple(indices[: needs[0]]), tuple(indices[needs[0] : sum(needs)])]
