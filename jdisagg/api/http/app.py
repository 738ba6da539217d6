"""The HTTP application of one process: routes, errors, API key."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from time import monotonic

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jdisagg.api.api_key import is_bearer_of
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.not_here import ASK_ELSEWHERE
from jdisagg.api.generation.token_engine import TokenEngine
from jdisagg.api.http.chat import answer_chat
from jdisagg.api.http.completions import answer_completion
from jdisagg.api.http.errors import error_response, plain_error
from jdisagg.api.http.foreign_pages import ForeignPages
from jdisagg.api.http.openapi import openapi_document
from jdisagg.api.http.operations import Operations
from jdisagg.api.http.request_id import HEADER, RequestIdHeader, logged_request_id, shown_request_id
from jdisagg.api.http.tokens import TokenEndpoints
from jdisagg.api.turns import Turns
from jdisagg.core.config import ServerConfig
from jdisagg.core.errors import JdisaggError, Unauthenticated
from jdisagg.core.logs import BUG_EVERY_S, BUG_FIRST, Seldom
from jdisagg.core.told import told
from jdisagg.core.values import keys_of

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
BUGS_TOLD = "jdisagg.bugs_told"  # a key of the scope: whoever calls tells of bugs, and not of each

_MEANT = (  # ends of paths, and the path that serves what is asked for there
    ("/chat/completions", "/v1/chat/completions"),
    ("/responses", "/v1/chat/completions"),
    ("/completions", "/v1/completions"),
    ("/models", "/v1/models"),
    ("/tokenize", "/tokenize"),
    ("/detokenize", "/detokenize"),
)
REFUSED_EVERY_S = 60.0  # a line in the log: anybody who reaches the port can cause it
_MOST_PATH = 100  # characters, there
_GUARDED = ("/v1/", "/tokenize", "/detokenize")


def make_app(
    edge: Edge | None, engine: TokenEngine, metrics_text: Callable[[], str], config: ServerConfig = ServerConfig()
) -> Starlette:
    """The application. `edge` None: a role without completions, which serves health, readiness, metrics and debug only.
    What uses the model asks for a key, if `config` has one; that of clients will do. Its origins are those of web pages whose
    scripts may call it and read answers."""
    routes = Operations(engine, metrics_text).routes()
    if edge is None:
        routes += [Route(path, _ask_elsewhere, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
    else:
        routes += _completion_routes(edge)
    origins, keys = config.allowed_origins, keys_of(config.api_key) + keys_of(config.client_api_key)
    layers = [
        *([_cross_origin(origins)] if origins else []),  # outside: scripts may read refusals, too
        Middleware(RequestIdHeader),
        Middleware(ForeignPages, allowed_origins=origins),
        *([Middleware(_ApiKeyGuard, api_keys=keys)] if keys else []),
    ]
    handlers = {JdisaggError: _on_error, HTTPException: _on_http_error, Exception: _on_bugs()}
    app = Starlette(routes=routes, middleware=layers, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would go to whatever host the client named
    return app


def _cross_origin(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[HEADER],
    )


def _completion_routes(edge: Edge) -> list[Route]:
    tokens = TokenEndpoints(edge)

    async def openapi(request: Request) -> Response:
        return JSONResponse(openapi_document(edge.card.name))

    turns = Turns()
    return [
        Route("/v1/models", tokens.models),
        Route("/v1/models/{name:path}", tokens.model),
        Route("/v1/completions", _counted(answer_completion, edge, turns), methods=["POST"]),
        Route("/v1/chat/completions", _counted(answer_chat, edge, turns), methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/openapi.json", openapi),
    ]


def _counted(respond: Callable[[Edge, Request], Awaitable[Response]], edge: Edge, turns: Turns) -> Endpoint:
    """`respond` of `edge`, a few calls at a time; those that it refuses, or a bug ends, count as requests that ended so."""

    async def responding(request: Request) -> Response:
        await turns.wait()
        try:
            return await respond(edge, request)
        except HTTPException:  # no request came
            raise
        except Exception as error:
            edge.ends.failed(error)
            raise

    return responding


class _ApiKeyGuard:
    """Asks for `Authorization: Bearer KEY` on everything that uses the model. Who has none, or a wrong one, is in the log, or
    nobody but they would know, as when a key was exchanged here and not there: never what they sent, which may be a good one
    with a letter too many."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [key.encode() for key in api_keys]
        self._seldom = Seldom(REFUSED_EVERY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        guarded = scope["type"] == "http" and scope["path"].startswith(_GUARDED)
        if guarded and not is_bearer_of(Headers(scope=scope).get("authorization", "").encode(), self._expected):
            where, (host, *_) = told(scope["path"], _MOST_PATH), scope.get("client") or ("?",)
            text = "a call of %s from %s was refused (401): missing or wrong API key"
            self._seldom.say(log, logging.WARNING, text, where, host, now_s=monotonic())
            error = Unauthenticated("missing or wrong API key; send the header 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _ask_elsewhere(request: Request) -> Response:
    return plain_error(404, ASK_ELSEWHERE)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JdisaggError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = _meant(request) if error.status_code == HTTPStatus.NOT_FOUND else ""
    response = plain_error(error.status_code, f"{error.detail}: {request.method} {request.url.path}{hint}")
    response.headers.update(error.headers or {})
    return response


def _meant(request: Request) -> str:
    """The path that a client may mean whose base URL has no /v1, or two, or that speaks a newer API; "" = who knows."""
    path = request.url.path.rstrip("/")
    served = {route.path for route in request.app.routes if isinstance(route, Route)}
    for end, meant in _MEANT:
        if meant in served and path.endswith(end) and request.url.path != meant:
            return f"; use {meant}"
    return ""


def _on_bugs() -> Callable[[Request, Exception], Awaitable[Response]]:
    """The server logs the traceback, and not whose it is; the client learns only that it is not its fault."""
    seldom = Seldom(BUG_EVERY_S, BUG_FIRST)

    async def on_bug(request: Request, error: Exception) -> Response:
        if BUGS_TOLD not in request.scope:
            text, whose = "request %s failed: %r; the stack is logged, too", logged_request_id(request.scope)
            seldom.say(log, logging.ERROR, text, whose, error, now_s=monotonic())
        response = plain_error(500, "internal error; the server's log has the details")
        response.headers.update(shown_request_id(request.scope))  # starlette answers a bug outside of all middleware
        return response

    return on_bug
