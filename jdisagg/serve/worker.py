"""Composition root of the worker roles: prefill, decode, unified and colocated.

Order of a start: bind both ports (a taken one fails at once), answer probes, load, compile and run everything, start the
engine, run one request through the real loop, serve, register with routers, READY.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from time import monotonic

from jdisagg.api.channels import Credentials, advertised, bind, make_server
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.staged import StagedApp
from jdisagg.api.listening import listen
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import Config
from jdisagg.core.drill import HOOKS_VARIABLE
from jdisagg.core.metrics import GRPC_PORT, HTTP_PORT, Metrics
from jdisagg.models.resolve import resolve_model
from jdisagg.roles.self_test import self_test
from jdisagg.roles.watchdog import Watchdog
from jdisagg.serve.accepting import end_when_nobody_accepts
from jdisagg.serve.build import build_deployment
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.edges import Edges
from jdisagg.serve.engines import exit_on_crash
from jdisagg.serve.lateness import observe_lateness
from jdisagg.serve.process import Process, keep_what_is_there
from jdisagg.serve.ready import Ready, announce
from jdisagg.serve.text_edge import TextModel, read_text_model
from jdisagg.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def _read(config: Config) -> tuple[TextModel | None, Tokenizer | None]:
    """What it needs of text: a prefill worker does with less, or nothing. Raises ConfigError."""
    directory = resolve_model(config.model.model, weights=False)  # `load_model` fetches them
    if config.role == "prefill":
        return None, Tokenizer.from_directory_if_there(directory)
    text = read_text_model(directory)
    return text, text.tokenizer


async def serve(config: Config, process: Process) -> int:
    """The life of one worker process, until SIGTERM; returns the exit status."""
    started_s = monotonic()
    credentials = Credentials(api_key=config.server.api_key, client_api_key=config.server.client_api_key)
    grpc_server = make_server(credentials)
    address = bind(grpc_server, config.server.host, config.server.grpc_port)
    front, metrics = StagedApp(), Metrics()
    refused = metrics.connections_refused.labels(port=HTTP_PORT)
    http = HttpServer(front, listen(config.server.host, config.server.port), on_refused=refused.inc)
    await http.start()
    public = advertised(address, config.server.advertise_host, config.server.advertise_port)
    worker = f"pid {os.getpid()} @ {public}"
    text, tokenizer = await process.unless_stopped(asyncio.to_thread(_read, config))
    loop = asyncio.get_running_loop()
    build = asyncio.to_thread(
        build_deployment,
        *(config, metrics, worker, loop, exit_on_crash),
        credentials=credentials,
        address=public,
        tokenizer=tokenizer,
    )
    deployment = await process.unless_stopped(build)
    edges = Edges(config, deployment, text=text, address=public, server=grpc_server, front=front)
    process.dump_with(edges.engine.debug_state)
    for engine in deployment.engines:
        await process.unless_stopped(asyncio.to_thread(self_test, engine))
    deployment.compiles_are_over()
    timeout_s, dead_after_s = config.device.step_timeout_s, config.transfer.dead_after_s
    watchdog = Watchdog(list(deployment.engines), timeout_s, dead_after_s=dead_after_s)
    watchdog.start()
    await grpc_server.start()
    await edges.start(advertised(http.address, config.server.advertise_host))
    _install_test_hooks(deployment)
    keep_what_is_there()
    accepting = end_when_nobody_accepts(process, address, metrics.connections_refused.labels(port=GRPC_PORT).inc)
    watches = [asyncio.create_task(watch) for watch in (observe_lateness(metrics), accepting)]
    announce(
        Ready(
            role=config.role,
            http=http.address,
            grpc=address,
            model=edges.model_name,
            warmup_s=round(monotonic() - started_s, 2),
            executables=deployment.num_executables,
            bits=deployment.bits or None,
        )
    )
    deadline_s = await process.drained(edges.drain, config.server.drain_s)
    edges.send_away()
    await edges.until_read(deadline_s)
    await http.stop(deadline_s)
    await grpc_server.stop(1.0)
    await edges.close()
    watchdog.stop()
    await cancel_and_wait(*watches)
    await asyncio.to_thread(deployment.stop)
    log.info("stopped")
    return 0


def _install_test_hooks(deployment: Deployment) -> None:
    """SIGUSR2 freezes the engine thread, as a hung device would; again thaws it. SIGRTMIN makes it raise, as a failed step."""
    if os.environ.get(HOOKS_VARIABLE) == "1":
        loop, front = asyncio.get_running_loop(), deployment.front
        loop.add_signal_handler(signal.SIGUSR2, front.freeze_or_thaw)
        loop.add_signal_handler(signal.SIGRTMIN, front.break_down)
