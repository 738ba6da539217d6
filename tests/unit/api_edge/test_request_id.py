"""X-Request-Id: the client's name for a call is in the engine's request id and comes back, whatever the answer."""

from __future__ import annotations

import re

import httpx
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

BODY = {"model": "tiny", "prompt": "the"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the"}]}


def test_the_header_names_the_request_and_comes_back(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, trust_env=False) as client:
            for path, body, kind in (("/v1/completions", BODY, "cmpl"), ("/v1/chat/completions", CHAT, "chatcmpl")):
                for stream in (False, True, False):  # the same name again is another request
                    answer = await client.post(path, json=body | {"stream": stream}, headers={"X-Request-Id": "job-7"})
                    assert answer.status_code == 200
                    assert answer.headers["x-request-id"] == "job-7"
                    assert f'"id":"{kind}-job-7-' in answer.text.replace(": ", ":")
        ids = [asked.request_id for asked in engine.requests]
        assert len(set(ids)) == len(ids) == 6
        assert all("-job-7-" in one for one in ids)

    run(check())


@pytest.mark.parametrize("field", ["request_id", "rid"])
def test_a_name_in_the_body_does_as_well_and_the_header_comes_first(tokenizer: Tokenizer, field: str) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, trust_env=False) as client:
            for path, body, kind in (("/v1/completions", BODY, "cmpl"), ("/v1/chat/completions", CHAT, "chatcmpl")):
                answer = await client.post(path, json=body | {field: "job-7"})
                assert answer.headers["x-request-id"] == "job-7"
                assert answer.json()["id"].startswith(f"{kind}-job-7-")
                answer = await client.post(path, json=body | {field: "job-7"}, headers={"X-Request-Id": "job-8"})
                assert answer.headers["x-request-id"] == "job-8"
                for bad in ("two words", "", 7):
                    answer = await client.post(path, json=body | {field: bad})
                    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)

    run(check())


def test_without_a_header_the_answer_names_the_id_it_got(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, trust_env=False) as client:
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.headers["x-request-id"] == answer.json()["id"]
            assert engine.requests[0].request_id.startswith(answer.json()["id"])
            refused = await client.post("/v1/completions", json=BODY | {"top_p": 7}, headers={"X-Request-Id": "job-8"})
            assert (refused.status_code, refused.headers["x-request-id"]) == (400, "job-8")
            health = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
            assert len(set(health)) == 2

    run(check())


@pytest.mark.parametrize(("path", "kind"), [("/v1/completions", "cmpl"), ("/v1/chat/completions", "chatcmpl")])
def test_every_error_names_the_id_that_an_answer_would_have_had(tokenizer: Tokenizer, path: str, kind: str) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, trust_env=False) as client:
            engine.state = None  # type: ignore[assignment]  # /health fails by a bug
            answers = [
                await client.post(path, content=b"{"),
                await client.post(path, content=b"[1]"),
                await client.post(path, json={"stream": 5}),
                await client.post(path, json={"prompt": [], "messages": []}),
                await client.post(path, json=(BODY if kind == "cmpl" else CHAT) | {"model": "other"}),
                await client.get(path),
            ]
            for answer in answers:
                assert answer.status_code in (400, 404, 405)
                assert re.fullmatch(kind + r"-[0-9a-f]{32}", answer.headers["x-request-id"]), answer.text
            bug = await client.get("/health", headers={"X-Request-Id": "job-9"})
            assert (bug.status_code, bug.headers["x-request-id"]) == (500, "job-9")

    run(check())


def test_an_empty_header_is_none(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, trust_env=False) as client:
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
                answer = await client.post(path, json=body, headers={"X-Request-Id": ""})
                assert answer.headers["x-request-id"] == answer.json()["id"], "a fresh one"
                answer = await client.post(path, json=body | {"request_id": "job-7"}, headers={"X-Request-Id": ""})
                assert answer.headers["x-request-id"] == "job-7"

    run(check())


@pytest.mark.parametrize("bad", ["two words", "x" * 129, "tab\there", "caf\xe9"])
def test_a_bad_header_is_refused_by_name(tokenizer: Tokenizer, bad: str) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, trust_env=False) as client:
            headers = [(b"x-request-id", bad.encode("latin-1"))]
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 400
            assert "x-request-id: wanted 1 to 128" in answer.json()["error"]["message"]
            assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer.headers["x-request-id"])
            assert not engine.requests

    run(check())
