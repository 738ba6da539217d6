"""Composition root of the worker roles: prefill, decode, unified and colocated.

Order of a start: bind both ports (a taken one fails at once), answer probes, load, compile and run everything, start the
engine, run one request through the real loop, serve, register with routers, READY.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

import grpc.aio

from jdisagg.api.admin import AdminService
from jdisagg.api.channels import Credentials, advertised, bind, make_server
from jdisagg.api.fleet_client import FleetClient
from jdisagg.api.generation import GenerationServicer
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.api.http.app import make_app
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.starting import StartingApp
from jdisagg.api.kv_events import KVEventsService
from jdisagg.api.listening import listen
from jdisagg.api.local_engine import LocalEngine
from jdisagg.api.piece_server import add_peer_service
from jdisagg.api.worker_service import WorkerService
from jdisagg.core.config import Config
from jdisagg.core.drill import HOOKS_VARIABLE
from jdisagg.core.fleet import Member
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.models.resolve import resolve_model
from jdisagg.roles.self_test import self_test
from jdisagg.roles.watchdog import Watchdog
from jdisagg.serve.build import build_deployment
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.engines import exit_on_crash
from jdisagg.serve.leaving import Leaving
from jdisagg.serve.process import Process, keep_what_is_there, run_process
from jdisagg.serve.ready import Ready, announce
from jdisagg.serve.text_edge import TextModel, make_edge, read_text_model
from jdisagg.v1 import admin_pb2_grpc, generation_pb2_grpc, kv_events_pb2_grpc, worker_pb2_grpc

log = logging.getLogger(__name__)
T = TypeVar("T")


def run(config: Config) -> int:
    """Serve until SIGTERM; returns the exit status."""
    return run_process(lambda process: serve(config, process))


async def serve(config: Config, process: Process) -> int:
    """The life of one worker process."""
    started_s = monotonic()
    credentials = Credentials(api_key=config.server.api_key, client_api_key=config.server.client_api_key)
    grpc_server = make_server(credentials)
    address = bind(grpc_server, config.server.host, config.server.grpc_port)
    app = StartingApp()
    http = HttpServer(app, listen(config.server.host, config.server.port), stop_timeout_s=config.server.drain_s)
    await http.start()
    metrics = Metrics()
    public = advertised(address, config.server.advertise_host, config.server.advertise_port)
    worker = f"pid {os.getpid()} @ {public}"
    text = None if config.role == "prefill" else read_text_model(resolve_model(config.model.model))
    loop = asyncio.get_running_loop()
    build = asyncio.to_thread(
        build_deployment, config, metrics, worker, loop, exit_on_crash, credentials=credentials, address=public
    )
    deployment = await _unless_stopped(process, build)
    parts = _Edges(config, deployment, text=text, metrics=metrics, address=public, server=grpc_server)
    process.dump_with(parts.engine.debug_state)
    for engine in deployment.engines:
        await _unless_stopped(process, asyncio.to_thread(self_test, engine))
    deployment.compiles_are_over()
    watchdog = Watchdog(list(deployment.engines), config.device.step_timeout_s)
    watchdog.start()
    await grpc_server.start()
    app.serve(parts.app)
    await parts.start()
    _install_test_hooks(deployment)
    keep_what_is_there()
    announce(
        Ready(
            role=config.role,
            http=http.address,
            grpc=address,
            model=parts.model_name,
            warmup_s=round(monotonic() - started_s, 2),
            executables=deployment.num_executables,
        )
    )
    await process.stopping.wait()
    deadline_s = monotonic() + config.server.drain_s
    unfinished = await parts.drain(deadline_s)
    if unfinished:
        log.warning("requests still running at the end of --drain-s: %d", unfinished)
    else:
        log.info("drained: every request has ended")
    parts.engine.close()
    await http.stop(deadline_s)
    await grpc_server.stop(1.0)
    await parts.close()
    watchdog.stop()
    await asyncio.to_thread(deployment.stop)
    log.info("stopped")
    return 0


async def _unless_stopped(process: Process, work: Coroutine[Any, Any, T]) -> T:
    """Await a part of the start. SIGTERM meanwhile ends the process at once: a compiling thread cannot be stopped."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(process.stopping.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        log.info("ended before it was ready; no request was lost")
        os._exit(0)
    stopped.cancel()
    return task.result()


class _Edges:
    """What a worker shows to the outside: services, HTTP application, registration."""

    def __init__(
        self,
        config: Config,
        deployment: Deployment,
        *,
        text: TextModel | None,
        metrics: Metrics,
        address: str,
        server: grpc.aio.Server,
    ) -> None:
        self.model_name = config.served_name
        self._text_digest = "" if text is None else text.tokenizer.digest()
        self.engine = LocalEngine(
            deployment.front,
            deployment.card(self.model_name),
            not_ready_reason=deployment.not_ready_reason,
            helpers=deployment.engines[:-1],
        )
        self._config = config
        self._deployment = deployment
        self._address = address
        self._fleet: FleetClient | None = None
        self._draining = False
        self._metrics = metrics
        edge = None
        names = ["AdminService", "KVEventsService"]
        if text is not None:
            names += ["GenerationService", "WorkerService"]
            edge = make_edge(self.engine, text, config.server, metrics)
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(edge), server)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self.engine, config.transfer), server)
        if deployment.peer_server is not None:
            names.append("PeerService")
            add_peer_service(deployment.peer_server, server)
        admin = AdminService(drain=self.drain, stats=self.engine.debug_state, reset_prefix_cache=deployment.reset_prefix_cache)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        self._kv_events = KVEventsService(deployment.kv_rings, metrics)
        kv_events_pb2_grpc.add_KVEventsServiceServicer_to_server(self._kv_events, server)
        services = tuple(f"jdisagg.v1.{name}" for name in names)
        self._health = HealthReporter(server, services, self.engine.health)
        self.app = Leaving(
            make_app(
                edge,
                self.engine,
                self._metrics_text,
                config.server.api_key,
                config.server.allowed_origins,
                client_api_key=config.server.client_api_key,
            )
        )
        metrics.set_build(role=config.role, model=self.model_name)

    async def start(self) -> None:
        """Report health and register with the routers."""
        await self._health.start()
        if self._config.server.router:
            self._fleet = FleetClient(
                self._member(),
                self._config.server.router,
                state=lambda: (self.engine.load, self._draining),
                on_prefill=self._deployment.learn_prefill,
                credentials=Credentials(api_key=self._config.server.api_key),
                config=self._config.transfer,
            )

    def _member(self) -> Member:
        card, core = self.engine.card, self._deployment.core
        return Member(
            role=Role.UNIFIED if self._config.role == "colocated" else Role(self._config.role),
            address=self._address,
            worker=core.worker,
            epoch=core.epoch,
            fingerprint=card.fingerprint,
            fingerprint_parts=core.loaded.fingerprint_parts,
            model=card.name,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            needs_prefill=self._deployment.needs_prefill,
            text_digest=self._text_digest,
        )

    def _metrics_text(self) -> str:
        self._deployment.count_compiles()
        return self._metrics.text()

    async def drain(self, deadline_s: float) -> int:
        """Say so to routers and decode workers, admit nothing more, wait. There is no way back but a restart."""
        if not self._draining:
            log.info("draining: nothing more is admitted, what runs is waited for %.3g s", max(0.0, deadline_s - monotonic()))
        self._draining = True
        self.app.leave()
        if self._deployment.peer_server is not None:
            self._deployment.peer_server.drain()
        await self._kv_events.close()
        await self._health.close()
        if self._fleet is not None:
            await self._fleet.announce()
        return await self.engine.drain(deadline_s)

    async def close(self) -> None:
        """End registration and peer connections."""
        if self._fleet is not None:
            await self._fleet.close()
        await self._deployment.aclose()


def _install_test_hooks(deployment: Deployment) -> None:
    """SIGUSR2 freezes the engine thread, as a hung device would; again thaws it."""
    if os.environ.get(HOOKS_VARIABLE) == "1":
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, deployment.front.freeze_or_thaw)
