"""An engine in this process behind the same HTTP application as a server's, without a socket."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import httpx
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.http.app import BUGS_TOLD, make_app
from jdisagg.core.config import Config
from jdisagg.core.metrics import Metrics
from jdisagg.models.resolve import resolve_model
from jdisagg.roles.self_test import self_test
from jdisagg.roles.watchdog import Watchdog
from jdisagg.serve.build import build_deployment
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.engines import exit_on_crash
from jdisagg.serve.process import GC_THRESHOLDS, keep_what_is_there
from jdisagg.serve.text_edge import TextModel, make_edge, read_text_model

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_local(config: Config, timeout: httpx.Timeout) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a fresh engine (unified or colocated), compiled and tested; the engine ends with the context."""
    metrics, worker, loop = Metrics(), f"pid {os.getpid()}", asyncio.get_running_loop()
    text = read_text_model(resolve_model(config.model.model, weights=False))
    deployment = await asyncio.to_thread(
        build_deployment, config, metrics, worker, loop, exit_on_crash, tokenizer=text.tokenizer
    )
    watchdog = Watchdog(list(deployment.engines), config.device.step_timeout_s)
    watchdog.start()
    try:
        for engine in deployment.engines:
            await asyncio.to_thread(self_test, engine)
        deployment.compiles_are_over()
        with searched_seldom():
            async with client_of(_application(config, deployment, text, metrics, timeout), timeout) as client:
                yield client
    finally:
        watchdog.stop()
        await deployment.aclose()
        await asyncio.to_thread(deployment.stop)


@contextmanager
def searched_seldom() -> Iterator[None]:
    """The process, which is whoever's, is searched for garbage as a worker is, and afterwards as it was before. Engines that
    are still there have no worse of it than longer searches."""
    thresholds = gc.get_threshold()
    keep_what_is_there()
    try:
        yield
    finally:
        gc.unfreeze()
        if thresholds != GC_THRESHOLDS:  # else another one's, that may have ended meanwhile
            gc.set_threshold(*thresholds)


def client_of(app: ASGIApp, timeout: httpx.Timeout) -> httpx.AsyncClient:
    """A client of `app`, which answers a bug as a server does, with 500: it ends one line of a batch, not all of it."""
    transport = httpx.ASGITransport(app=_Logged(app), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://in-process", timeout=timeout)


class _Logged:
    """An application whose bugs are in the log, as a server's are, each kind once: a batch has many lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._told: set[type[Exception]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        scope[BUGS_TOLD] = True
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if type(error) not in self._told:
                self._told.add(type(error))
                log.exception("%s: a bug; its like is not told of again", scope.get("path"))
            raise


def _application(
    config: Config, deployment: Deployment, text: TextModel, metrics: Metrics, timeout: httpx.Timeout
) -> Starlette:
    engine = LocalEngine(
        deployment.front,
        deployment.card(config.served_name),
        not_ready_reason=deployment.not_ready_reason,
        grammars=deployment.core.grammars,
    )
    server = replace(config.server, default_deadline_s=timeout.read or config.server.default_deadline_s)
    edge = make_edge(engine, text, server, config.model, grammars=deployment.gate)
    return make_app(edge, engine, metrics.text)
