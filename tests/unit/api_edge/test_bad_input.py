"""Every bad field gets a 400 that names it; nothing reaches the engine."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from jdisagg.api.http import body, protocol
from jdisagg.api.http.app import make_app
from jdisagg.core.json_values import MAX_DEPTH
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

GOOD = {"model": "tiny", "prompt": "the"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
IGNORED = """
    user store metadata service_tier parallel_tool_calls reasoning_effort modalities prediction audio functions function_call
    truncate_prompt_tokens spaces_between_special_tokens include_stop_str_in_output length_penalty early_stopping detokenize
    use_beam_search documents chat_template add_generation_prompt continue_final_message mm_processor_kwargs bad_words verbosity
    top_logprobs max_new_tokens
""".split()
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""} | {"add_special_tokens": False}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10_000]}, "prompt"),
    ({"prompt": [3] * 200}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": [3] * 190, "max_tokens": 11}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"10000": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {" 5 ": 1}}, "logit_bias"),
    ({"logit_bias": {"\uff15": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": -1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [-5]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 64}, "stop_token_ids"),  # EOS takes one of the 64 places
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": 1, "max_tokens": 0, "echo": True}, "min_tokens"),
    ({"seed": "x"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": False, "regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"response_format": {"json_schema": {"name": "x", "schema": {}}}}, "response_format.type"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": '{"const": NaN}'}, "guided_json"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
    ({"json_schema": '{"a":' * 300 + "1" + "}" * 300}, "json_schema"),
    ({"json_schema": True}, "json_schema"),
    ({"structured_outputs": {"schema": {}}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"priority": 2**40}, "priority"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": float("nan")}, "timeout_s"),
    ({"timeout_s": -(10**400)}, "timeout_s"),
    ({"timeout_s": "10s"}, "timeout_s"),
    ({"max_token": 4}, "max_token"),
    ({"temprature": 0}, "temprature"),
    ({"stop_tokens_ids": [5]}, "stop_tokens_ids"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning_effort": ["low"]}, "reasoning_effort"),
    ({"reasoning_effort": 0}, "reasoning_effort"),
    ({"reasoning_efort": "low"}, "reasoning_efort"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_token": 4}, "max_completion_token"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f g"}}], "tool_choice": "required"}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f"}}] * 2, "tool_choice": "required"}, "tools[1].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}], "tool_choice": "required"}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}], "tool_choice": "required"}, "tools"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required", "guided_json": {}}, "tool_choice"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required", "min_tokens": 1}, "min_tokens"),
    ({"tools": [{"function": {"name": "g"}}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
]


def test_an_error_does_not_repeat_all_that_the_client_sent(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", json=GOOD | {"model": "é" * 100_000})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert error["message"].startswith("model 'éé")
            assert len(answer.content) < 8000

    run(check())


def test_every_bad_field_is_named(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            table = [("/v1/completions", GOOD | fields, field) for fields, field in COMPLETIONS]
            table += [("/v1/chat/completions", CHAT | fields, field) for fields, field in CHATS]
            for path, body, field in table:
                answer = await http.post(path, content=_json(body))
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, field), (body, answer.text)
                assert error["type"] == "invalid_request_error"
                assert field.split("[")[0] in error["message"] or error["code"] == "context_length_exceeded", error
            assert served.engine.requests == []
            too_long = await http.post("/v1/completions", json=GOOD | {"prompt": [3] * 300})
            assert too_long.json()["error"]["code"] == "context_length_exceeded"
            assert "maximum context length is 200 tokens" in too_long.json()["error"]["message"]
            stops = await http.post("/v1/completions", json=GOOD | {"stop": ["a", "a" * 5000]})
            assert stops.json()["error"]["message"].endswith("; got 5000")

    run(check())


def test_what_is_said_of_a_wrong_prompt_is_what_is_taken(tokenizer: Tokenizer) -> None:
    """An empty string is: its tokens are those that the tokenizer puts before every text."""

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for fields, got in (({"model": "tiny"}, "null"), (GOOD | {"prompt": []}, "[]"), (GOOD | {"prompt": [[]]}, "[[]]")):
                message = (await http.post("/v1/completions", json=fields)).json()["error"]["message"]
                wanted = "a string, a non-empty list of token ids, or a non-empty list of either"
                assert message == f"prompt: must be {wanted}; got {got}"
            for prompt in ("", [""], [3], [[3], [4]]):
                assert (await http.post("/v1/completions", json=GOOD | {"prompt": prompt})).status_code == 200

    run(check())


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/v1/v1/completions", "/v1/completions"),  # or with two
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/responses", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_who_asks_at_a_path_beside_one_that_is_served_is_told_that(tokenizer: Tokenizer, asked: str, meant: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post(asked, json=GOOD)
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, f"Not Found: POST {asked}; use {meant}")
            assert (await http.get("/nowhere")).json()["error"]["message"] == "Not Found: GET /nowhere"

    run(check())


def test_a_process_without_completions_sends_nobody_to_those(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        app = make_app(None, FakeEngine(tokenizer, "fox"), lambda: "")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            assert (await http.get("/v1/models")).json()["error"]["message"] == "Not Found: GET /v1/models"
            assert (await http.get("/models")).json()["error"]["message"] == "Not Found: GET /models"

    run(check())


def test_paths_methods_models_and_bodies_that_are_wrong(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for response, status in [
                (await http.get("/nowhere"), 404),
                (await http.get("/v1/completions"), 405),
                (await http.get("/v1/models/other"), 404),
                (await http.get("/v1/models//"), 404),
                (await http.get("/health/"), 404),
                (await http.post("/v1/completions/", json=GOOD), 404),
                (await http.post("/tokenize/", json={"prompt": "x"}), 404),
                (await http.post("/v1/completions", json=GOOD | {"model": "other"}), 404),
                (await http.post("/v1/completions", content=b"{"), 400),
                (await http.post("/v1/completions", content=b"[1]"), 400),
                (await http.post("/v1/completions", content=b"[" * 60_000), 400),
                (await http.post("/v1/completions", content=b'"' + b"\xff" * 9), 400),
                (await http.post("/v1/completions", content=b" " * (33 * 2**20)), 413),
                (await http.post("/tokenize", json={}), 400),
                (await http.post("/detokenize", json={"tokens": [-1]}), 400),
                (await http.post("/detokenize", json={}), 400),
            ]:
                assert response.status_code == status, response.text
                assert response.json()["error"]["message"]
            missing = await http.post("/v1/completions", json=GOOD | {"model": "other"})
            assert missing.json()["error"]["code"] == "model_not_found"
            assert served.engine.requests == []

    run(check())


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("Identity", 200), ("", 200)]
)
def test_a_compressed_body_is_refused_by_its_encoding(tokenizer: Tokenizer, encoding: str, status: int) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "x"), tokenizer) as served, httpx.AsyncClient(timeout=30) as http:
            content = b'{"prompt": "the"}' if status == 200 else gzip.compress(b'{"prompt": "the"}')
            url = f"http://127.0.0.1:{served.port}/v1/completions"
            answer = await http.post(url, content=content, headers={"content-encoding": encoding})
            assert answer.status_code == status, answer.text
            if status != 200:
                wanted = f"the body has content-encoding {encoding}; send it without one: POST /v1/completions"
                assert answer.json()["error"]["message"] == wanted

    run(check())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "the", "max_tokens": true}', "max_tokens: must be an integer; got true"),
        (b'{"prompt": "the", "max_tokens": "5"}', 'max_tokens: must be an integer; got "5"'),
        (b'{"prompt": "the", "max_tokens": 1.5}', "max_tokens: must be an integer; got 1.5"),
        (b'{"prompt": "the", "temperature": true}', "temperature: must be a number; got true"),
        (b'{"prompt": "a\xff"}', "the body is not UTF-8, as JSON must be: byte 0xff at offset 13"),
        (b"\xff\xfe{\x00}\x00", "the body is not UTF-8, as JSON must be: byte 0xff at offset 0"),
        (b'{"prompt": "\xed\xa0\x80"}', "the body is not UTF-8, as JSON must be: byte 0xed at offset 12"),
        (b"\xff", "the body is not UTF-8, as JSON must be: byte 0xff at offset 0"),
    ],
)
def test_the_message_says_what_is_wanted(tokenizer: Tokenizer, content: bytes, said: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
            assert (await http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "the"}')).status_code == 200

    run(check())


@pytest.mark.parametrize("fields", [{"stop": None, "n": None, "logit_bias": None, "stream": None, "seed": None}, {"top_k": -1}])
def test_null_means_absent(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", json=GOOD | fields)
            assert answer.json()["choices"][0]["text"] == "fox"
            assert served.engine.requests[0].sampling.top_k is None

    run(check())


def test_a_misspelt_field_is_told_from_one_that_others_know(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            misspelt = await http.post("/v1/completions", json=GOOD | {"max_token": 4})
            said = "max_token: is no field of this request; did you mean max_tokens?"
            assert misspelt.json()["error"]["message"] == said
            for path, fields in (("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)):
                for name in IGNORED:
                    if (path, name) != ("/v1/chat/completions", "top_logprobs"):
                        answer = await http.post(path, json=fields | {name: None})
                        assert answer.status_code == 200, (name, answer.text)

    run(check())


def test_a_body_sent_slowly_is_read_whole(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            body = b'{"prompt": "the"}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 17\r\n\r\n")
            for byte in body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.001)
            assert b'"text":"fox"' in await reader.read()
            writer.close()

    run(check())


def _json(body: dict[str, Any]) -> bytes:
    """JSON with NaN and Infinity, which httpx refuses to write."""
    return json.dumps(body).encode()


def test_a_body_that_is_nested_too_deep_is_the_callers_fault(tokenizer: Tokenizer) -> None:
    """Whatever its depth: Python reads more than it can write again, and more than a template can."""

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for depth in (MAX_DEPTH, *range(900, 1000, 3)):
                for path, begin, end in (
                    ("/v1/completions", '{"prompt": "a", "temperature": ', "}"),
                    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "tools": [{"a": ', "}]}"),
                ):
                    nested = begin + "[" * depth + "1" + "]" * depth + end
                    answer = await http.post(path, content=nested)
                    assert (answer.status_code, "nested" in answer.text) == (400, True), depth
            fine = {"max_tokens": 2, "metadata": "[" * 5000, "user": [[[[]]] * 999]}
            assert (await http.post("/v1/chat/completions", json=CHAT | fine)).status_code == 200

    run(check())


@pytest.mark.parametrize("text", ['{"prompt": "\\ud800"}', '{"prompt": "a", "stop": ["\\uDFff"]}'])
def test_half_a_surrogate_pair_is_the_callers_fault(tokenizer: Tokenizer, text: str) -> None:
    async def check() -> None:
        async with (
            serving(FakeEngine(tokenizer, "fox"), tokenizer) as served,
            httpx.AsyncClient(base_url=served.http) as client,
        ):
            answer = await client.post("/v1/completions", content=text, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert "half of a pair of surrogates" in answer.json()["error"]["message"]
            whole = text.replace("\\ud800", "\\ud83d\\ude00").replace("\\uDFff", "\\uD83D\\uDE00")
            answer = await client.post("/v1/completions", content=whole, headers={"content-type": "application/json"})
            assert answer.status_code == 200

    run(check())


def test_hopelessly_long_text_is_refused_without_tokenizing_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with (
            serving(FakeEngine(tokenizer, "fox"), tokenizer) as served,
            httpx.AsyncClient(base_url=served.http) as client,
        ):
            monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
            answer = await client.post("/v1/completions", json={"prompt": "a " * 100_000, "max_tokens": 2})
            assert answer.status_code == 400
            assert "maximum context length is 200 tokens" in answer.json()["error"]["message"]

    run(check())


@pytest.mark.parametrize("sent", [b"GET /hea", b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"])
def test_a_request_that_never_comes_whole_is_ended(tokenizer: Tokenizer, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.2)

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(sent)
            async with asyncio.timeout(30.0):
                answer = await reader.read(4096)
            if b"{" not in sent:
                assert answer == b""
            else:
                assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), "clients of OpenAI ask again after that"
                assert b"\r\nconnection: close\r\n" in answer, "the rest may come yet, and is no request"
                assert b"did not arrive within 0.2 s" in answer
            writer.close()

    run(check())
