"""`--role local`: a router, prefill workers and decode workers as processes of this machine, kept running until SIGTERM.

The router comes first: workers register with it, so they may restart on other ports while it keeps its own. READY is printed
when the router says a request would be served. SIGTERM ends the router (it lets streams finish), then decode, then prefill.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from jdisagg.core.config import Config, LocalConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.printed import to_flags
from jdisagg.core.settings import API_KEY_VARIABLE, CLIENT_API_KEY_VARIABLE
from jdisagg.core.values import parse_ranges
from jdisagg.serve.child import ChildSpec
from jdisagg.serve.process import Process
from jdisagg.serve.ready import Ready, announce
from jdisagg.serve.supervisor import Patience, StartFailed, Supervisor
from jdisagg.serve.tpu import TpuHost, find_tpu, share_chips

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
FLEET_READY_S = 60.0  # from the last READY of a worker to a router that would serve
SERVE = (sys.executable, "-m", "jdisagg.serve")
GRACE_BEYOND_DRAIN_S = 5.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment: it is this machine


def router_spec(config: Config, program: Sequence[str]) -> ChildSpec:
    """The router: our edges. A restart keeps the ports of the first run."""

    def command(previous: Ready | None) -> Sequence[str]:
        server = config.server
        if previous is not None:
            server = replace(server, port=_port(previous.http, server.port), grpc_port=_port(previous.grpc, server.grpc_port))
        return [*program, *to_flags(replace(config, role="router", server=server, local=LocalConfig()))]

    return ChildSpec(name="router", command=command, environ=_shared_environ(config), stage=0)


def worker_specs(config: Config, router: str, program: Sequence[str], tpu: TpuHost | None = None) -> list[ChildSpec]:
    """Decode and prefill workers, on loopback and free ports, registering with `router` (HOST:PORT). Raises ConfigError when
    devices are too few."""
    local, log_path = config.local, config.scheduler.schedule_log
    roles = [("prefill", config.prefill_tp, i) for i in range(local.num_prefill)]
    roles += [("decode", config.decode_tp, i) for i in range(local.num_decode)]
    needs, devices = [tp for _, tp, _ in roles], config.device.devices
    shares = split_devices(devices, needs) if tpu is None else share_chips(tpu, devices, needs, os.environ)
    server = replace(
        config.server, host=LOOPBACK, advertise_host=None, advertise_port=None, port=0, grpc_port=0, router=(router,)
    )
    specs = []
    for (role, tp, index), share in zip(roles, shares, strict=True):
        settings = replace(
            config,
            role=role,
            model=replace(config.model, tensor_parallel_size=tp),
            device=replace(config.device, devices=share),
            transfer=replace(config.transfer, prefill=()),  # the router names the peers of each request
            scheduler=replace(config.scheduler, schedule_log=log_path and f"{log_path}.{role}-{index}"),
            server=server,
            local=LocalConfig(),
        )
        flags = [*program, *to_flags(settings)]
        command, environ = (lambda _, flags=flags: flags), _shared_environ(config)
        specs.append(ChildSpec(name=f"{role}-{index}", command=command, environ=environ, stage=1 if role == "decode" else 2))
    return specs


def _shared_environ(config: Config) -> Mapping[str, str]:
    """One API key for all processes of the fleet, since each asks the others for it, and that of clients; argv is for everybody
    to read."""
    keys = {API_KEY_VARIABLE: config.server.api_key, CLIENT_API_KEY_VARIABLE: config.server.client_api_key}
    return {variable: key for variable, key in keys.items() if key}


def split_devices(devices: str | None, needs: Sequence[int]) -> list[str | None]:
    """`--devices` of each worker: disjoint shares when there are enough, else the workers go round them.

    Raises ConfigError when one worker alone needs more than there are.
    """
    if devices is None:
        return [None] * len(needs)
    indices = parse_ranges(devices, "--devices")
    if max(needs, default=0) > len(indices):
        raise ConfigError(
            f"--devices: got {devices!r} ({len(indices)} devices), wanted at least {max(needs)} for the largest worker; "
            "name more devices or lower --prefill-tp / --decode-tp"
        )
    following = itertools.cycle(indices)
    return [",".join(str(index) for index in itertools.islice(following, need)) for need in needs]


async def serve(config: Config, process: Process, program: Sequence[str] = SERVE) -> int:
    """Run the fleet of `config` until `process.stopping`, or until it can no longer be kept running; returns the exit status.
    `program` is the command that serves one role."""
    began_s = time.monotonic()
    supervisor = Supervisor(Patience(grace_s=config.server.drain_s + GRACE_BEYOND_DRAIN_S))

    async def state() -> Mapping[str, object]:
        return {"children": supervisor.pids, "restarts": supervisor.restarts}

    process.dump_with(state)
    starting = asyncio.create_task(_start_fleet(config, supervisor, program))
    stopping = asyncio.create_task(process.stopping.wait())
    broken = asyncio.create_task(supervisor.is_broken.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            router, workers = starting.result()
            announce(_fleet_ready(config, router, workers, time.monotonic() - began_s))
            await asyncio.wait((stopping, broken), return_when=asyncio.FIRST_COMPLETED)
    except StartFailed as error:
        log.error("giving up: %s", error)
        return error.status
    finally:
        starting.cancel()
        clean = await supervisor.stop()
        stopping.cancel()
        broken.cancel()
    return 0 if clean and not supervisor.is_broken.is_set() else 1


async def _start_fleet(config: Config, supervisor: Supervisor, program: Sequence[str]) -> tuple[Ready, list[Ready]]:
    """Router and workers READY, and the router ready to serve."""
    (router,) = await supervisor.start([router_spec(config, program)])
    if router.grpc is None or router.http is None:
        raise StartFailed("the router announced no address", 1)
    workers = await supervisor.start(worker_specs(config, _reachable(router.grpc), program, find_tpu(os.environ)))
    deadline_s = time.monotonic() + FLEET_READY_S
    is_over = False
    while True:
        serves, reason = await asyncio.to_thread(_probe, f"http://{_reachable(router.http)}/ready")
        if serves:
            return router, workers
        if is_over:
            told = f"all workers are up, but the router was not ready after {FLEET_READY_S:.0f} s: {reason}"
            raise StartFailed(told, 1)
        await asyncio.sleep(0.1)
        is_over = time.monotonic() >= deadline_s  # it is asked once more: this process may have stood still


def _probe(url: str) -> tuple[bool, str]:
    """Whether GET `url` answers 200, and what it said otherwise."""
    try:
        try:
            with DIRECT.open(url, timeout=2.0) as response:
                return response.status == 200, ""
        except urllib.error.HTTPError as error:
            return False, f"{error.code} {error.read(500).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:  # also of what it said otherwise
        return False, repr(error)


def _fleet_ready(config: Config, router: Ready, workers: Sequence[Ready], seconds: float) -> Ready:
    keep = ("role", "pid", "http", "grpc", "warmup_s", "executables", "bits")
    children = [{k: v for k, v in asdict(r).items() if k in keep and v is not None} for r in (router, *workers)]
    return Ready(
        role="local",
        http=router.http,
        grpc=router.grpc,
        model=config.served_name,
        warmup_s=round(seconds, 3),
        executables=sum(worker.executables for worker in workers),
        pid=os.getpid(),
        workers=tuple(children),
    )


def _reachable(address: str) -> str:
    """An address to connect to, for one that may be bound to every interface."""
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK}:{port}" if host in ("0.0.0.0", "[::]", "") else address


def _port(address: str | None, otherwise: int) -> int:
    return int(address.rpartition(":")[2]) if address else otherwise
