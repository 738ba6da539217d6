"""What the answer has to be: each field for it comes to the engine as one grammar, or is refused by its own name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import grpc.aio
import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import TextRequest
from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http import grammars
from jdisagg.api.http.body import Body
from jdisagg.api.http.grammars import read_grammar
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind, SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import EOS, FakeEngine, FakeGrammars, run, serving
from tests.unit.text.tiny_tokenizer import train_byte_level

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "the"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
SCHEMA = {"type": "object", "properties": {"z": {"const": "é"}, "a": {}}}
TEXT = '{"type":"object","properties":{"z":{"const":"é"},"a":{}}}'
JSON, OBJECT = Grammar(GrammarKind.JSON_SCHEMA, TEXT), Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
ANY_JSON = Grammar(GrammarKind.JSON_SCHEMA, "{}")
REGEX, LARK = Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.LARK, "start: /b/")
WORDY = {"title": "t" * MAX_GRAMMAR_BYTES, "description": "d" * MAX_GRAMMAR_BYTES}
OPENAI = {"name": "x", "description": "y", "strict": True, "schema": SCHEMA}
READ: list[tuple[str, Any, Grammar]] = [
    ("response_format", {"type": "json_object"}, OBJECT),
    *(("response_format", {"type": "json_object", "schema": nothing}, OBJECT) for nothing in (None, {}, "{}", False, "")),
    *(("response_format", {"type": "json_object", "schema": schema}, JSON) for schema in (SCHEMA, TEXT)),
    (
        "response_format",
        {"type": "json_object", "schema": {"required": ["a"]}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","required":["a"]}'),
    ),
    (
        "response_format",
        {"type": "json_object", "schema": {"type": None, "anyOf": None}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","anyOf":null}'),
    ),
    ("response_format", {"type": "json_object", "schema": {"const": None}}, Grammar(GrammarKind.JSON_SCHEMA, '{"const":null}')),
    ("response_format", {"type": "json_schema", "json_schema": OPENAI}, JSON),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA | WORDY}}, JSON),
    *((name, SCHEMA | WORDY, JSON) for name in ("structured_outputs.json", "guided_json", "json_schema")),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, ANY_JSON),
    ("structured_outputs.json", SCHEMA, JSON),
    ("structured_outputs.json", TEXT.replace(":", " : "), JSON),
    ("structured_outputs.regex", "a+", REGEX),
    ("structured_outputs.choice", ["a+", "b"], Grammar(GrammarKind.REGEX, r"a\x{2b}|b")),
    ("structured_outputs.grammar", "start: /b/", LARK),
    ("structured_outputs.json_object", True, OBJECT),
    ("guided_json", SCHEMA, JSON),
    ("guided_json", {}, ANY_JSON),
    ("guided_json", "{}", ANY_JSON),
    ("guided_regex", "a+", REGEX),
    ("guided_choice", ["b"], Grammar(GrammarKind.REGEX, "b")),
    ("guided_grammar", "start: /b/", LARK),
    ("guided_json_object", True, OBJECT),
    ("json_schema", TEXT, JSON),
    ("json_schema", {}, ANY_JSON),
    ("regex", "a+", REGEX),
    ("allowed_token_ids", [9, 7, 3, 8, 7], Grammar(GrammarKind.LARK, "start: <[3,7-9]> start")),
]
WRONG = {  # what the fake compiler refuses
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "@"}}},
    "structured_outputs.json": {"const": "@"},
    "structured_outputs.grammar": "@",
    "guided_json": {"const": "@"},
    "regex": "@",
}
HARD = [
    *("a.b*", 'q"uo"te', "back\\slash\\n", "new\nline", "\r\n", "tab\t", "nul\0x", "\x7f", "\x01", "é", "漢字", "😀", "\u2028"),
    *(
        "a|b",
        "(",
        "]",
        "{1}",
        "^$",
        "/x/i",
        "%{}",
        "<tok>",
        "<[5]>",
        "'",
        " ",
        "  lead",
        "-",
        "~",
        "&",
        "#",
        "@",
        "_",
        "\\x{41}",
    ),
    *("\ufeff", "\x85", "\ud7ff", "\U0010ffff", "a", "ab", "abc", "e\u0301", "\u0130", "\u017f"),
]
OTHERS = ["", "A", "axb*", "new", "aa", "b", "\\n", "back\\slash\n", "x", "É", "\u0301", "i", "s", "lead", "a.b*a.b*"]


def fields(name: str, value: Any) -> dict[str, Any]:
    """A body's field; of an inner one, the object around it."""
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_field_comes_to_the_engine_as_a_grammar_that_was_prepared(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name, value, grammar in READ:
                served.grammars.prepared.clear()
                answer = await http.post(path, json=GOOD[path] | fields(name, value) | {"n": 2, "guided_decoding_backend": "x"})
                assert answer.status_code == 200, (name, value, answer.text)
                assert [request.sampling.grammar for request in served.engine.requests[-2:]] == [grammar] * 2, (name, value)
                assert served.grammars.prepared == [grammar]
            assert (await http.post(path, json=GOOD[path])).status_code == 200
            assert served.engine.requests[-1].sampling.grammar is None

    run(check())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_two_fields_at_once_are_refused_by_both_names(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name, value, _ in READ:
                other = "guided_regex" if name == "regex" else "regex"
                error = (await http.post(path, json=GOOD[path] | fields(name, value) | {other: "a"})).json()["error"]
                assert name in error["message"]
                assert other in error["message"]
                assert error["param"] in (name, other)
            both = {"structured_outputs": {"json": {}, "choice": ["a"]}}
            error = (await http.post(path, json=GOOD[path] | both)).json()["error"]
            assert error["param"] == "structured_outputs.choice"
            assert "structured_outputs.json says already" in error["message"]
            assert served.engine.requests == []

    run(check())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_grammar_that_does_not_compile_is_refused_by_the_name_of_its_field(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name, value in WRONG.items():
                for stream in (False, True):
                    answer = await http.post(path, json=GOOD[path] | fields(name, value) | {"stream": stream})
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"], error["message"]) == (400, name, f"{name}: has an @")
            assert served.engine.requests == []

    run(check())


def test_a_wrong_schema_of_a_json_object_is_refused_by_its_name() -> None:
    for schema in ([], 7, "[]", "{"):
        with pytest.raises(InvalidRequest, match=r"response_format\.schema: ") as caught:
            read_grammar(Body({"response_format": {"type": "json_object", "schema": schema}}))
        assert caught.value.field == "response_format.schema"


def test_grpc_clients_send_the_grammar_itself(tokenizer: Tokenizer) -> None:
    def asked(text: str, **more: Any) -> generation_pb2.GenerateRequest:
        grammar = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text=text)
        return generation_pb2.GenerateRequest(text="the", sampling=common_pb2.SamplingParams(grammar=grammar, **more))

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            async for _ in served.stub.Generate(asked("a+")):
                pass
            assert served.grammars.prepared == [REGEX]
            assert [request.sampling.grammar for request in served.engine.requests] == [REGEX]
            for request, told in [
                (asked("@"), "grammar: has an @"),
                (asked(""), f"grammar: its text must have 1 to {MAX_GRAMMAR_BYTES} bytes; got 0"),
                (asked("é" * (MAX_GRAMMAR_BYTES // 2 + 1)), f"got {MAX_GRAMMAR_BYTES + 2}"),
                (asked("a", ignore_eos=True), "ignore_eos: "),
                (asked("a", min_tokens=1), "min_tokens: "),
            ]:
                with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
                    async for _ in served.stub.Generate(request):
                        pass
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(served.engine.requests) == 1

    run(check())


def test_nothing_is_compiled_or_tokenized_for_a_request_that_is_refused(tokenizer: Tokenizer) -> None:
    grammars = FakeGrammars()
    edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer, grammars=grammars)
    asked = TextRequest(request_id="a", prompts=("the",), sampling=SamplingParams(grammar=REGEX, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        run(edge.admit(asked))
    assert grammars.prepared == []
    wrong = replace(asked, prompts=("the", ()), sampling=SamplingParams(grammar=Grammar(GrammarKind.REGEX, "@")))
    with pytest.raises(InvalidRequest, match="has an @"):  # not that a prompt is empty
        run(edge.admit(wrong))


def test_a_server_that_cannot_constrain_answers_says_so(tokenizer: Tokenizer) -> None:
    edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer)
    asked = TextRequest(request_id="a", prompts=("the",), sampling=SamplingParams(grammar=REGEX))
    with pytest.raises(InvalidRequest, match="grammar: answers of the served model cannot be constrained") as caught:
        run(edge.admit(asked))
    assert caught.value.field == "grammar"
    assert run(edge.admit(replace(asked, sampling=SamplingParams()))).requests


@pytest.mark.parametrize("name", ["guided_json", "json_schema"])
def test_a_schema_is_bounded_by_its_bytes_however_it_is_written(name: str) -> None:
    text = "é" * (MAX_GRAMMAR_BYTES // 2 - 6)  # {"const":".."} has 12 bytes around it
    grammar = read_grammar(Body({name: {"const": text}}))
    assert grammar is not None
    assert len(grammar.text.encode()) == MAX_GRAMMAR_BYTES
    for value in ({"const": text + "a"}, f'{{"const":"{text}a"}}', '{"a":' * 10**6, {"enum": list(range(10**6))}):
        with pytest.raises(InvalidRequest, match=f"{name}: may have at most {MAX_GRAMMAR_BYTES} bytes"):
            read_grammar(Body({name: value}))


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs.choice"])
def test_choices_that_are_too_long_are_refused_before_they_are_written(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    most = ["a" * (MAX_GRAMMAR_BYTES // 2), "b" * (MAX_GRAMMAR_BYTES // 2)]
    assert read_grammar(Body(fields(field, most))) is not None
    monkeypatch.setattr(grammars, "_literal", lambda _: pytest.fail("written"))
    for value in ([*most, "c"], ["!" * (MAX_GRAMMAR_BYTES + 1)]):
        with pytest.raises(InvalidRequest, match=f"{field}: may have at most {MAX_GRAMMAR_BYTES} bytes; shorten it") as caught:
            read_grammar(Body(fields(field, value)))
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("whitespace_pattern", " ?", '"x-guidance": {"whitespace_pattern": '),
        ("disable_any_whitespace", True, '"x-guidance": {"whitespace_pattern": ""}'),
        ("disable_additional_properties", True, '"additionalProperties": false'),
        ("structural_tag", "{}", "grammar"),
    ],
)
def test_what_is_not_served_beside_a_schema_is_refused_with_what_to_write_instead(field: str, value: Any, instead: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"structured_outputs.{field}: ")) as caught:
        read_grammar(Body({"structured_outputs": {"json": SCHEMA, field: value}}))
    assert instead in caught.value.message
    assert caught.value.field == f"structured_outputs.{field}"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory = train_byte_level(tmp_path_factory.mktemp("tiny"))
    return LLTokenizer((directory / "tokenizer.json").read_text(), eos_token=EOS)


@pytest.mark.parametrize("choices", [HARD, *([text] for text in HARD)], ids=ascii)
def test_a_choice_matches_its_texts_and_nothing_else(vocabulary: LLTokenizer, choices: list[str]) -> None:
    grammar = read_grammar(Body({"guided_choice": choices}))
    assert grammar is not None
    for text in (*HARD, *OTHERS):
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_regex(grammar.text))
        token_ids = vocabulary.tokenize_bytes(text.encode())
        is_whole = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        assert not matcher.is_error(), matcher.get_error()
        assert is_whole == (text in choices), (text, choices)
