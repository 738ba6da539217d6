"""`bad_words`: how it comes to the engine, and beside what it is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.text.bad_words import MAX_BAD_LENGTH, MAX_BAD_WORDS, without
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"bad_words": [""]}, "bad_words", f"bad_words: strings must have 1 to {MAX_BAD_LENGTH} characters; got 0"),
    ({"bad_words": ["a" * (MAX_BAD_LENGTH + 1)]}, "bad_words", f"got {MAX_BAD_LENGTH + 1}"),
    ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words", f"bad_words: may hold at most {MAX_BAD_WORDS} strings"),
    ({"bad_words": [5]}, "bad_words", "bad_words: "),
    ({"bad_words": ["a"], "regex": "b"}, "bad_words", "bad_words: regex says already what the answer has to be"),
    ({"bad_words": ["a"], "ignore_eos": True}, "ignore_eos", "ignore_eos: "),
    ({"bad_words": ["a"], "min_tokens": 1}, "min_tokens", "min_tokens: "),
]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("words", [["fox", " é"], "fox"])
def test_they_come_to_the_engine_as_a_grammar_that_was_prepared(tokenizer: Tokenizer, path: str, words: Any) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "dog"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            assert (await http.post(path, json=GOOD[path] | {"bad_words": words})).status_code == 200
            grammar = without(["fox"] if words == "fox" else words)
            assert served.grammars.prepared == [grammar]
            assert [request.sampling.grammar for request in served.engine.requests] == [grammar]

    run(check())


@pytest.mark.parametrize("path", GOOD)
def test_what_they_cannot_be_is_refused_by_its_name(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "dog"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for fields, name, told in REFUSED:
                answer = await http.post(path, json=GOOD[path] | fields)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name), fields
                assert told in error["message"]
            assert served.engine.requests == []

    run(check())


def test_a_call_that_is_forced_has_no_words_to_leave_out(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "dog"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            path = "/v1/chat/completions"
            asked = GOOD[path] | {"bad_words": ["a"], "tools": [TOOL], "tool_choice": "required"}
            error = (await http.post(path, json=asked)).json()["error"]
            assert error["param"] == "bad_words"
            assert "tools says already what the answer has to be" in error["message"]

    run(check())
