"""What every role serves, and the endpoints around completions."""

from __future__ import annotations

import asyncio
import socket
from importlib import metadata
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from jdisagg.api.generation.token_engine import Health
from jdisagg.api.http.app import make_app
from jdisagg.api.http.body import Body
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.unserved import CHAT_FIELDS, COMPLETION_FIELDS
from jdisagg.api.listening import listen
from jdisagg.core.config import ServerConfig
from jdisagg.core.errors import ConfigError
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

KEYED = ServerConfig(api_key="key")


def test_health_and_readiness_say_why_not(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 200
            engine.state = Health(reason="no usable prefill worker")
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).json() == {"status": "not ready", "reason": "no usable prefill worker"}
            engine.state = Health(healthy=False, reason="no tick for 7 s")
            assert (await http.get("/health")).status_code == 503
            assert [(await http.request(method, "/ping")).status_code for method in ("GET", "POST")] == [503, 503]
            assert (await http.get("/ready")).status_code == 503

    run(check())


def test_metrics_debug_models_and_openapi(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with (
            serving(FakeEngine(tokenizer, "fox"), tokenizer) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            metrics = await http.get("/metrics")
            assert metrics.text == "jdisagg_up 1\n"
            assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            head = await http.head("/metrics")
            assert (head.status_code, head.content) == (200, b"")
            assert (await http.get("/debug/state")).json() == {"live": []}
            [model] = [model async for model in served.client.models.list()]
            assert model.id == "tiny"
            more = model.model_extra or {}
            assert (more["root"], more["parent"], more["max_model_len"]) == ("tiny", None, 200)
            served.edge.source = "Org/Tiny"  # as where a name was given to it
            models = (await http.get("/v1/models")).json()
            assert models["data"][0]["root"] == "Org/Tiny"
            assert (await http.get("/v1/models/")).json() == models, "an empty name is none"
            assert (await http.get("/v1/models/tiny")).json() == models["data"][0]
            assert (await served.client.models.retrieve("tiny")).id == "tiny"
            document = (await http.get("/openapi.json")).json()
            assert document["openapi"].startswith("3.")
            assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}

    run(check())


def test_the_schema_lists_what_the_endpoints_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused fields are read and not listed."""
    read: set[str] = set()

    def get(body: Body, name: str) -> Any:
        if not body.where.startswith("messages["):  # those of a message are not listed
            read.add(name)
        return get_field(body, name)

    get_field = Body.get
    messages = [{"role": "user", "content": "x"}]
    endpoints = {
        "/v1/completions": ([{"prompt": "x"}], COMPLETION_FIELDS),
        "/v1/chat/completions": ([{"messages": messages}], CHAT_FIELDS),
        "/tokenize": ([{"prompt": "x"}, {"messages": messages}], CHAT_FIELDS),
        "/detokenize": ([{"tokens": [3]}], ()),
    }

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            paths = (await http.get("/openapi.json")).json()["paths"]
            monkeypatch.setattr(Body, "get", get)
            for path, (bodies, unserved) in endpoints.items():
                read.clear()
                for body in bodies:
                    assert (await http.post(path, json=body)).status_code == 200
                schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
                listed = set(schema["properties"]) | set(schema["properties"].get("stream_options", {}).get("properties", ()))
                assert listed == read - {name for entry in unserved for name in entry.names}, path

    run(check())


def test_the_schema_lists_every_path_that_is_served(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            paths = (await http.get("/openapi.json")).json()["paths"]
            app = make_app(served.edge, served.engine, lambda: "")
            routes = {route.path for route in app.routes if isinstance(route, Route)}
            assert set(paths) == {path.replace(":path", "") for path in routes} - {"/openapi.json"}
            for route in (route for route in app.routes if isinstance(route, Route) and route.path != "/openapi.json"):
                served_methods = {method.lower() for method in route.methods or ()} - {"head"}
                assert set(paths[route.path.replace(":path", "")]) - {"parameters"} == served_methods
            for path in (path for path, methods in paths.items() if "get" in methods):
                assert (await http.get(path.format(name=served.edge.card.name))).status_code == 200, path

    run(check())


def test_the_schema_asks_for_a_prompt_or_messages_to_tokenize(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            paths = (await http.get("/openapi.json")).json()["paths"]
            schema = paths["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["anyOf"] == [{"required": ["prompt"]}, {"required": ["messages"]}]
            assert (await http.post("/tokenize", json={})).status_code == 400

    run(check())


def test_the_version_is_that_of_what_is_installed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def shown() -> str:
        transport = httpx.ASGITransport(make_app(None, FakeEngine(tokenizer, "fox"), lambda: "", KEYED))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.get("/version")).json()["version"]

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", {"jdisagg": "7"}.__getitem__)
    assert run(shown()) == "7"
    monkeypatch.setattr(metadata, "version", not_installed)
    assert run(shown()) == "unknown"


def test_tokenize_and_detokenize(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = (await http.post("/tokenize", json={"prompt": "the fox 😀", "return_token_strs": True})).json()
            assert answer["tokens"] == list(tokenizer.encode("the fox 😀"))
            assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 200)
            assert answer["token_strs"][0] == "<s>"
            text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
            assert text == {"prompt": "<s>the fox 😀"}
            chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
            prompt = "<s><|user|>x</s>\n<|assistant|>"
            assert chat["tokens"] == list(tokenizer.encode(prompt, add_special_tokens=False))

    run(check())


def test_a_role_without_completions_serves_operations_only(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        app = make_app(None, FakeEngine(tokenizer, "fox"), lambda: "up 1\n", KEYED)
        server = HttpServer(app, listen())
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://{server.address}") as http:
            for path in ("/health", "/ping", "/ready", "/metrics", "/version", "/debug/state"):
                assert (await http.get(path)).status_code == 200
        await server.stop(0.0)
        await server.stop(0.0)

    run(check())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_completions_asked_of_a_prefill_worker_name_whom_to_ask(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        transport = httpx.ASGITransport(make_app(None, FakeEngine(tokenizer, "fox"), lambda: ""))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            answer = await http.post(path, json={"prompt": "x"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "this is a prefill worker; ask a decode worker or the router"

    run(check())


def test_debug_state_is_for_this_machine_only(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        app = make_app(None, FakeEngine(tokenizer, "fox"), lambda: "")
        for client in ("203.0.113.9", "unknown"):  # a proxy on this machine may have been told no address
            transport = httpx.ASGITransport(app, client=(client, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                assert (await http.get("/debug/state")).status_code == 403
                assert (await http.get("/health")).status_code == 200

    run(check())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1:8000", "127.0.0.1", "localhost:8000", "LocalHost", "[::1]:8000", "[::1]", "")),
        *((host, 403) for host in ("evil.example:8000", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80")),
    ],
)
def test_debug_state_is_not_for_a_page_whose_name_was_made_to_lead_here(tokenizer: Tokenizer, host: str, status: int) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            assert (await http.get("/debug/state", headers={"host": host})).status_code == status
            assert (await http.get("/v1/models", headers={"host": host})).status_code == 200, "a Service's name, say"

    run(check())


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via"])
@pytest.mark.parametrize("said", ["203.0.113.9", "127.0.0.1", ""])
def test_debug_state_is_not_for_clients_of_a_proxy_on_this_machine(tokenizer: Tokenizer, header: str, said: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            assert (await http.get("/debug/state")).status_code == 200
            assert (await http.get("/debug/state", headers={header: said})).status_code == 403

    run(check())


def test_nobody_is_sent_to_the_host_that_the_request_names(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path in ("/health/", "/v1/completions/", "/metrics/"):
                answer = await http.get(path, headers={"host": "evil.example"})
                assert (answer.status_code, answer.headers.get("location")) == (404, None)

    run(check())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")
def test_every_address_is_meant_by_two_colons_and_loopback_is_loopback_on_both(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        app = make_app(None, FakeEngine(tokenizer, "fox"), lambda: "")
        server = HttpServer(app, listen("::"))
        await server.start()
        try:
            async with httpx.AsyncClient() as http:
                for host in ("127.0.0.1", "[::1]"):
                    for path in ("/ready", "/debug/state"):
                        assert (await http.get(f"http://{host}:{server.port}{path}")).status_code == 200, host + path
        finally:
            await server.stop(0.0)

    run(check())


def test_a_taken_port_is_a_configuration_error(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        app = make_app(None, FakeEngine(tokenizer, "fox"), lambda: "")
        server = HttpServer(app, listen())
        with pytest.raises(ConfigError, match=f"port {server.port}.*choose another"):
            listen(port=server.port)
        await server.stop(0.0)
        await asyncio.sleep(0)

    run(check())
