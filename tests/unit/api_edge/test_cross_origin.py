"""Scripts of other web pages: what they may call, and what they may read."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest

from jdisagg.api.http.app import make_app
from jdisagg.core.config import ServerConfig
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

PAGE = "https://chat.example:3000"
WANTS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


async def _ask(
    tokenizer: Tokenizer,
    allowed: tuple[str, ...],
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    content: bytes = b"",
    key: str | None = "key",
) -> httpx.Response:
    engine = FakeEngine(tokenizer, "fox")
    async with serving(engine, tokenizer) as served:
        app = make_app(served.edge, engine, lambda: "", ServerConfig(api_key=key, allowed_origins=allowed))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return await http.request(method, path, headers=headers, content=content)


@pytest.mark.parametrize(("allowed", "shown"), [((PAGE,), PAGE), (("https://b.example", PAGE), PAGE), (("*",), "*")])
def test_a_page_of_an_allowed_origin_is_told_beforehand_that_it_may_ask_without_a_key(
    tokenizer: Tokenizer, allowed: tuple[str, ...], shown: str
) -> None:
    answer = run(_ask(tokenizer, allowed, "OPTIONS", "/v1/chat/completions", {"origin": PAGE, **WANTS}))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == shown
    assert "POST" in answer.headers["access-control-allow-methods"]
    granted = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert {"authorization", "content-type"} <= granted


def test_its_scripts_may_read_refusals_and_the_request_id(tokenizer: Tokenizer) -> None:
    for key, status in (("key", 200), ("wrong", 401)):
        headers = {"origin": PAGE, "authorization": f"Bearer {key}", "x-request-id": "mine"}
        answer = run(_ask(tokenizer, (PAGE,), "GET", "/v1/models", headers))
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"].lower() == "x-request-id"
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("allowed", [(), ("https://b.example",), ("http://chat.example:3000",)])
def test_pages_of_other_origins_may_read_nothing(tokenizer: Tokenizer, allowed: tuple[str, ...]) -> None:
    beforehand = run(_ask(tokenizer, allowed, "OPTIONS", "/v1/chat/completions", {"origin": PAGE, **WANTS}))
    assert beforehand.status_code >= 400
    answer = run(_ask(tokenizer, allowed, "GET", "/v1/models", {"origin": PAGE, "authorization": "Bearer key"}))
    assert answer.status_code == 200
    for headers in (beforehand.headers, answer.headers):
        assert "access-control-allow-origin" not in headers


PLAIN, FORM, JSON = "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("allowed", "headers", "status"),
    [
        ((), {"origin": PAGE, "content-type": PLAIN}, 403),
        ((), {"origin": PAGE, "content-type": FORM}, 403),
        ((), {"origin": PAGE, "content-type": "multipart/form-data; boundary=application/json"}, 403),
        ((), {"origin": PAGE, "content-type": "text/plain; application/json"}, 403),
        ((), {"origin": PAGE}, 403),
        ((), {"origin": "null", "content-type": PLAIN}, 403),
        ((), {"origin": "null", "content-type": PLAIN, "host": ""}, 403),
        (("https://b.example",), {"origin": PAGE, "content-type": PLAIN}, 403),
        (("https://b.example",), {"origin": "http://b.example", "content-type": PLAIN}, 403),
        ((PAGE,), {"origin": PAGE, "content-type": PLAIN}, 200),
        (("*",), {"origin": "null", "content-type": FORM}, 200),
        ((), {"origin": PAGE, "content-type": JSON}, 200),  # of which browsers ask before, and are refused
        ((), {"origin": PAGE, "content-type": "application/ld+JSON"}, 200),
        ((), {"origin": "http://x", "content-type": PLAIN}, 200),  # the server's own pages
        ((), {"origin": "https://api.example:8443", "host": "API.example:8443", "content-type": PLAIN}, 200),  # TLS in front
        ((), {"origin": "http://x:81", "content-type": PLAIN}, 403),
        ((), {"content-type": FORM}, 200),  # curl -d
        ((), {}, 200),
    ],
)
def test_what_a_browser_sends_for_any_page_without_asking_is_computed_for_allowed_origins_alone(
    tokenizer: Tokenizer, allowed: tuple[str, ...], headers: dict[str, str], status: int
) -> None:
    answer = run(_ask(tokenizer, allowed, "POST", COMPLETIONS, headers, content=b'{"prompt": "the"}', key=None))
    assert answer.status_code == status, answer.text
    if status == 403:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert headers["origin"] in error["message"]
        assert "--allowed-origins" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
def test_pages_may_get_what_nothing_is_computed_for(tokenizer: Tokenizer, path: str) -> None:
    assert run(_ask(tokenizer, (), "GET", path, {"origin": PAGE, "content-type": PLAIN}, key=None)).status_code == 200
