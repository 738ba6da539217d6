"""What a worker shows to the outside: gRPC services, HTTP application, registration with routers."""

from __future__ import annotations

import logging
from functools import partial
from math import ceil
from time import monotonic

import grpc.aio

from jdisagg.api.admin import AdminService
from jdisagg.api.channels import Credentials
from jdisagg.api.fleet.client import FleetClient
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.generation.not_here import NotHere
from jdisagg.api.generation.service import GenerationServicer
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.api.http.app import make_app
from jdisagg.api.http.staged import StagedApp
from jdisagg.api.http.version import package_version
from jdisagg.api.kv_events.service import KVEventsService
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.config import Config
from jdisagg.core.fleet import Member, ProcessFacts, Report
from jdisagg.core.requests import Role
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.text_edge import TextModel, make_edge
from jdisagg.v1 import admin_pb2_grpc, generation_pb2_grpc, kv_events_pb2_grpc, worker_pb2_grpc

log = logging.getLogger(__name__)


class Edges:
    """Those of one worker. Services are on `server` when it is made, which has yet to start; `start` does the rest."""

    def __init__(
        self,
        config: Config,
        deployment: Deployment,
        *,
        text: TextModel | None,
        address: str,
        server: grpc.aio.Server,
        front: StagedApp,
    ) -> None:
        """`front`: what answers over HTTP until then, and then what is made here."""
        self.model_name = config.served_name
        self._text_digest = "" if text is None else text.tokenizer.digest()
        self.engine = LocalEngine(
            deployment.front,
            deployment.card(self.model_name),
            not_ready_reason=self._not_ready_reason,
            helpers=deployment.engines[:-1],
            grammars=deployment.core.grammars,
        )
        self._config = config
        self._deployment = deployment
        self._address = address
        self._front = front
        self._fleet: FleetClient | None = None
        self._draining = False
        core = deployment.core
        self._metrics = metrics = core.metrics
        edge: Edge | None = None
        self._runs: WorkerService | None = None
        names = ["AdminService", "KVEventsService"]
        if text is None:
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(NotHere(), server)
        else:
            names += ["GenerationService", "WorkerService"]
            edge = make_edge(self.engine, text, config.server, config.model, metrics, grammars=deployment.gate)
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(edge), server)
            self._runs = WorkerService(self.engine, config.transfer, core.grammars, worker=core.worker, epoch=core.epoch)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._runs, server)
        if deployment.peer_server is not None:
            names.append("PeerService")
            add_peer_service(deployment.peer_server, server)
        self._edge = edge
        admin = AdminService(drain=self.drain, stats=self.engine.debug_state, reset_prefix_cache=deployment.reset_prefix_cache)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        self._kv_events = KVEventsService(deployment.kv_rings, metrics)
        kv_events_pb2_grpc.add_KVEventsServiceServicer_to_server(self._kv_events, server)
        services = tuple(f"jdisagg.v1.{name}" for name in names)
        self._health = HealthReporter(server, services, self.engine.health)
        self._app = make_app(edge, self.engine, self._metrics_text, config.server)
        metrics.set_build(
            role=config.role,
            model=self.model_name,
            version=package_version(),
            platform=core.device.platform,
            device_kind=core.device.device_kind,
        )
        metrics.set_ready(lambda: self.engine.health().serves)

    async def start(self, http_address: str) -> None:
        """Answer over HTTP, at `http_address` as others know it, report health and register with the routers."""
        self._front.serve(self._app)
        await self._health.start()
        if self._config.server.router:
            self._fleet = FleetClient(
                self._member(http_address),
                self._config.server.router,
                state=partial(self._report, monotonic()),
                on_prefill=self._deployment.learn_prefill,
                credentials=Credentials(api_key=self._config.server.api_key),
                config=self._config.transfer,
            )
            self._fleet.show_in(self._metrics.fleet.routers)

    def _not_ready_reason(self) -> str:
        """Beside the deployment's own, that no router takes it: who replaces ready workers by such ones has to stop."""
        return self._deployment.not_ready_reason() or ("" if self._fleet is None else self._fleet.refusal())

    def _report(self, ready_s: float) -> Report:
        deployment, uptime_s = self._deployment, max(1, ceil(monotonic() - ready_s))
        return Report(self.engine.load, self._draining, deployment.cannot_serve(), deployment.is_alone(), uptime_s)

    def _member(self, http_address: str) -> Member:
        core = self._deployment.core
        return Member(
            role=Role.UNIFIED if self._config.role == "colocated" else Role(self._config.role),
            address=self._address,
            worker=core.worker,
            epoch=core.epoch,
            process=ProcessFacts(build=package_version(), http_address=http_address),
            card=self.engine.card,
            fingerprint_parts=core.loaded.fingerprint_parts,
            grammars=core.grammar_kinds,
            bits=self._deployment.bits,
            needs_prefill=self._deployment.needs_prefill,
            text_digest=self._text_digest,
            cache_tokens=self._deployment.cache_tokens,
        )

    def _metrics_text(self) -> str:
        self._deployment.count_compiles()
        return self._metrics.text()

    async def drain(self, deadline_s: float) -> int:
        """Say so to routers and decode workers, admit nothing more, wait. There is no way back but a restart."""
        if not self._draining:
            log.info("draining: nothing more is admitted, what runs is waited for %.3g s", max(0.0, deadline_s - monotonic()))
        self._draining = True
        self._front.leave()
        if self._deployment.peer_server is not None:
            self._deployment.peer_server.drain()
        await self._kv_events.close()
        await self._health.close()
        if self._fleet is not None:
            await self._fleet.announce()
        return await self.engine.drain(deadline_s)

    def send_away(self) -> None:
        """After `drain`: what still runs is told to go elsewhere."""
        self.engine.close()
        if self._deployment.peer_server is not None:
            self._deployment.peer_server.send_away()

    async def until_read(self, deadline_s: float) -> None:
        """After `drain`: wait until clients have read their answers, and routers have taken theirs."""
        if self._edge is not None:
            await self._edge.until_read(deadline_s)
        if self._runs is not None:
            await self._runs.until_taken(deadline_s)

    async def close(self) -> None:
        """End registration and peer connections."""
        if self._fleet is not None:
            await self._fleet.close()
        await self._deployment.aclose()
