"""Composition root of the router: public gRPC and HTTP edges over a fleet of workers that register here. No jax.

Order of a start: bind both ports (a taken one fails at once), read tokenizer and model settings, serve, READY. Workers come
and go; `/ready` says whether a request would be served now. SIGTERM: report NOT_SERVING, admit nothing, let streams end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

from jdisagg.api.admin import AdminService
from jdisagg.api.channels import Credentials, bind, make_server
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.api.generation.service import GenerationServicer
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.api.http.app import make_app
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.staged import StagedApp
from jdisagg.api.http.version import package_version
from jdisagg.api.listening import listen
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import Config
from jdisagg.core.drill import drill_of
from jdisagg.core.errors import Unavailable
from jdisagg.core.metrics import GRPC_PORT, HTTP_PORT, Metrics
from jdisagg.models.resolve import eos_token_ids, resolve_model
from jdisagg.router.entrance import Entrance
from jdisagg.router.fleet_engine import FleetEngine
from jdisagg.router.recovery import ReplayConfig
from jdisagg.router.service import FleetService
from jdisagg.serve.accepting import end_when_nobody_accepts
from jdisagg.serve.grammars import grammars_of
from jdisagg.serve.lateness import observe_lateness
from jdisagg.serve.process import Process, keep_what_is_there
from jdisagg.serve.ready import Ready, announce
from jdisagg.serve.text_edge import TextModel, make_edge, read_text_model
from jdisagg.text.grammar import Vocabulary
from jdisagg.v1 import admin_pb2_grpc, fleet_pb2_grpc, generation_pb2_grpc

SERVICES = ("jdisagg.v1.GenerationService", "jdisagg.v1.FleetService", "jdisagg.v1.AdminService")
GRPC_STOP_S = 1.0  # for calls that are still open after the drain


def _read(model: str) -> tuple[TextModel, Vocabulary | None]:
    """None: answers cannot be constrained. Raises ConfigError."""
    directory = resolve_model(model, weights=False)
    text = read_text_model(directory)
    grammars = grammars_of(text.tokenizer, text.tokenizer.vocab_size, eos_token_ids(directory))
    return text, grammars and grammars.vocabulary


async def serve(config: Config, process: Process) -> int:
    """The life of one router process, until SIGTERM; returns the exit status."""
    started_s = monotonic()
    credentials = Credentials(api_key=config.server.api_key, client_api_key=config.server.client_api_key)
    server = make_server(credentials)
    address = bind(server, config.server.host, config.server.grpc_port)
    listener = listen(config.server.host, config.server.port)
    model = config.served_name
    text, vocabulary = await process.unless_stopped(asyncio.to_thread(_read, config.model.model))
    metrics = Metrics(engine=False)
    name_build = partial(metrics.set_build, role="router", version=package_version())
    name_build(model=model)
    engine = FleetEngine(
        config=config.transfer,
        metrics=metrics,
        replay=ReplayConfig(budget_share=config.server.replay_budget),
        credentials=credentials,
        drill=drill_of(),
        slow_request_s=config.server.slow_request_s,
        entrance=Entrance(text.tokenizer.digest(), config.model.served_model_name),
    )
    metrics.set_ready(lambda: engine.health().serves)
    gate = None if vocabulary is None else GrammarGate(vocabulary, metrics)
    edge = make_edge(engine, text, config.server, config.model, metrics, grammars=gate)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(edge), server)
    fleet = FleetService(engine.workers, config.transfer)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
    health, front = HealthReporter(server, SERVICES, engine.health), StagedApp()

    async def drain(deadline_s: float) -> int:
        front.leave()
        await health.close()
        fleet.leave()
        return await engine.drain(deadline_s)

    admin = AdminService(drain=drain, stats=engine.debug_state, reset_prefix_cache=None)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    front.serve(make_app(edge, engine, partial(_shown, metrics, engine, name_build), config.server))
    http = HttpServer(front, listener, on_refused=metrics.connections_refused.labels(port=HTTP_PORT).inc)
    process.dump_with(engine.debug_state)
    await server.start()
    await http.start()
    await health.start()
    keep_what_is_there()
    accepting = end_when_nobody_accepts(process, address, metrics.connections_refused.labels(port=GRPC_PORT).inc)
    watches = [asyncio.create_task(watch) for watch in (observe_lateness(metrics), accepting)]
    announce(Ready(role="router", http=http.address, grpc=address, model=model, warmup_s=round(monotonic() - started_s, 3)))
    deadline_s = await process.drained(drain, config.server.drain_s)
    await fleet.everybody_told()
    await engine.close()
    await edge.until_read(deadline_s)
    await http.stop(deadline_s)
    await server.stop(GRPC_STOP_S)
    if gate is not None:
        await gate.aclose()
    await cancel_and_wait(*watches)
    return 0


def _shown(metrics: Metrics, engine: FleetEngine, name_build: Callable[..., None]) -> str:
    """What /metrics has; the model's name is that of /v1/models as soon as a worker has told it, until then our own setting."""
    with suppress(Unavailable):
        name_build(model=engine.card.name)
    return metrics.text()
