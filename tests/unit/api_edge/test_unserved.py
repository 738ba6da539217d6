"""What would change the answer and is not served is refused by name; a value that asks for nothing is accepted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "the"}, CHAT: {"messages": MESSAGES}}
REFUSED: list[tuple[str, Any]] = [
    ("ebnf", "root ::= 'a'"),
    ("grammar", "root ::= 'a'"),
    ("structural_tag", "{}"),
    ("guided_whitespace_pattern", " ?"),
    ("logits_processors", ["x.Y"]),
    ("custom_logit_processor", "x"),
    ("use_beam_search", True),
    ("length_penalty", 0.5),
    ("length_penalty", 2),
    ("no_stop_trim", True),
    ("stop_regex", "a+"),
    ("prompt_embeds", "AAAA"),
    ("lora_path", "x"),
    ("max_new_tokens", 4),
    ("max_length", 4),
    ("return_prompt_token_ids", True),
    ("return_meta_info", True),
    ("return_cached_tokens_details", True),
    ("return_routed_experts", True),
    ("truncation_side", "middle"),
    ("truncation_side", False),
    ("typical_p", 0.9),
    ("tfs_z", 0.9),
    ("top_a", 0.2),
    ("no_repeat_ngram_size", 3),
    ("dry_multiplier", 0.8),
    ("xtc_probability", 0.5),
    ("mirostat", 2),
    ("do_sample", False),
    ("num_beams", 4),
    ("repeat_penalty", 1.1),
    ("min_new_tokens", 4),
    ("max_output_tokens", 4),
    ("n_predict", -1),
    ("num_predict", 128),
    ("stop_sequences", ["a"]),
    ("token_ids", [5]),
    ("return_logprob", True),
    ("sampling_params", {"top_k": 1}),
    ("nvext", {"guided_regex": "a+"}),
    ("extra_body", {"guided_json": {}}),
    ("kv_transfer_params", {"do_remote_decode": True}),
    ("logprob_token_ids", [5]),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("watermarking", True),
    ("watermark", True),
    ("return_tokens", True),
    ("return_prompt_text", True),
    ("thinking_token_budget", 64),
    ("thinking_token_budget", 0),
    ("bootstrap_room", 7),
    ("suppress_tokens", [5]),
    ("bad_words_ids", [[5]]),
    ("banned_tokens", [5]),
    ("banned_strings", ["fox"]),
    ("custom_token_bans", "5"),
    ("random_seed", 7),
    ("random_seed", 0),
    ("lora", [{"id": 0, "scale": 0.5}]),
    ("adapter_id", "x"),
    ("reasoning_budget", 0),
    ("max_thinking_tokens", 64),
    ("stop_token", "a"),
    ("response_schema", {"type": "object"}),
    ("json_mode", True),
]
REFUSED_IN_COMPLETIONS: list[tuple[str, Any]] = [("suffix", "x"), ("top_logprobs", 2)]
REFUSED_IN_CHAT: list[tuple[str, Any]] = [
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"documents": []}),
    ("documents", [{"title": "a"}]),
    ("chat_template_args", {"tools": []}),
    ("chat_template_args", "x"),
    *(("enable_thinking", value) for value in (0, 1, "false", {"type": "enabled"})),
    ("include_reasoning", False),
    *(
        ("reasoning", value)
        for value in ({"effort": "extreme"}, {"effort": ["low"]}, {"effort": False}, "low", True, False, 0, [])
    ),
    *(("reasoning", {"effort": "low"} | more) for more in ({"max_tokens": 64}, {"exclude": True}, {"enabled": "no"})),
    *(("reasoning", value) for value in ({"enabled": 1}, {"max_tokens": 64}, {"exclude": True}, {"exclude": 0})),
    *(
        ("thinking", value)
        for value in ({"type": "adaptive"}, {"type": True}, {"budget_tokens": 64}, "enabled", True, False, [])
    ),
    ("thinking", {"type": "enabled", "budget_tokens": 64}),
    *(("think", value) for value in ("low", 0, 1, {})),
    *(("thinking_budget", value) for value in ("64", True, [], {"tokens": 64})),
    ("reasoning_format", "parsed"),
    ("parse_tool_calls", False),
    ("echo", True),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("web_search_options", {}),
    ("best_of", 2),
]
ACCEPTED: list[tuple[str, Any]] = [
    ("allowed_token_ids", []),
    ("bad_words", []),
    ("bad_words", False),
    ("response_format", {}),
    ("response_format", {"type": "text"}),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": None, "regex": False, "choice": None, "disable_any_whitespace": False}),
    ("structured_outputs", {"json": None, "of_a_later_version": None}),
    ("timeout", None),  # nearly one that is read, and absent
    ("max_token", None),
    ("guided_json", ""),
    ("guided_choice", None),
    ("guided_grammar", ""),
    ("json_schema", None),
    ("regex", ""),
    ("use_beam_search", False),
    ("include_stop_str_in_output", False),
    ("length_penalty", 1.0),
    ("early_stopping", True),
    ("typical_p", 1),
    ("top_a", 0.0),
    ("no_repeat_ngram_size", 0),
    ("dry_multiplier", 0),
    ("dry_base", 1.75),  # nothing without dry_multiplier
    ("mirostat", 0),
    ("do_sample", True),
    ("num_beams", 1),
    ("repeat_penalty", 1.0),
    ("spaces_between_special_tokens", False),  # no tokenizer here puts spaces there
    ("prediction", {"type": "content", "content": "fox"}),  # a hint to be faster
    ("reasoning_effort", "low"),
    ("thinking_token_budget", -1),  # as many as it likes
    *(("thinking_budget", value) for value in (19456, 0, 1.5)),  # advice
    ("return_meta_info", False),
    ("truncation_side", "left"),
    ("return_prompt_text", False),
    ("logprob_token_ids", []),
    ("top_logprobs", 0),
    ("user", "me"),
    ("watermark", False),  # TGI's
    ("return_tokens", False),  # llama.cpp's
    ("models", ["tiny", "other"]),  # OpenRouter's
    ("mode", "instruct"),  # text-generation-webui's
    ("banned_strings", []),  # SillyTavern's
    ("custom_token_bans", ""),
    ("random_seed", -1),
    ("lora", []),
    ("reasoning_budget", -1),  # llama.cpp's
    ("json_mode", False),
    ("extra_body", {"guided_json": None}),
]
ACCEPTED_IN_CHAT: list[tuple[str, Any]] = [
    ("modalities", ["text"]),
    *(("reasoning_format", value) for value in ("none", "raw", "auto")),  # llama.cpp's, Groq's
    ("separate_reasoning", True),  # SGLang's
    ("separate_reasoning", False),
    ("parse_tool_calls", True),  # llama.cpp's
    ("include_reasoning", True),
    *((name, value) for name in ("enable_thinking", "think") for value in (True, False)),
    ("think", ""),
    *(("thinking", {"type": kind}) for kind in ("enabled", "disabled")),
    *(("reasoning", {"effort": "low"} | more) for more in ({}, {"summary": None}, {"exclude": False})),
    ("chat_template_args", {"enable_thinking": False}),
    *(("reasoning", value) for value in ({}, {"effort": None, "summary": None}, {"exclude": False, "max_tokens": None})),
    *(("reasoning", {"effort": "low"} | more) for more in ({"enabled": True}, {"enabled": False, "exclude": False})),
    *(("thinking", value) for value in ({}, {"type": None}, {"type": "auto"})),
    ("functions", []),
    ("function_call", "none"),
    ("echo", False),
    ("continue_final_message", False),
    ("web_search_options", None),
    ("chat_template_kwargs", {"enable_thinking": False}),
]
CASES_REFUSED = [
    *((path, name, value) for path in GOOD for name, value in REFUSED),
    *((COMPLETIONS, name, value) for name, value in REFUSED_IN_COMPLETIONS),
    *((CHAT, name, value) for name, value in REFUSED_IN_CHAT),
]


def test_what_would_change_the_answer_is_refused_by_name(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path, name, value in CASES_REFUSED:
                answer = await http.post(path, json=GOOD[path] | {name: value})
                assert answer.status_code == 400, (path, name, value)
                error = answer.json()["error"]
                assert error["param"] == name
                assert error["message"].startswith(f"{name}: ")
            assert served.engine.requests == []

    run(check())


@pytest.mark.parametrize("name", ["n_predict", "num_predict"])
def test_what_others_call_max_tokens_is_told_by_that_name(tokenizer: Tokenizer, name: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {name: 128})
            assert answer.json()["error"]["message"] == f"{name}: is called max_tokens here"

    run(check())


def test_what_asks_for_nothing_is_accepted(tokenizer: Tokenizer) -> None:
    cases = [(path, *case) for path in GOOD for case in ACCEPTED] + [(CHAT, *case) for case in ACCEPTED_IN_CHAT]
    cases += [(path, name, None) for path, name, _ in CASES_REFUSED]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path, name, value in cases:
                answer = await http.post(path, json=GOOD[path] | {name: value})
                assert answer.status_code == 200, (path, name, value, answer.text)

    run(check())


def test_messages_are_tokenized_as_chat_would_or_not_at_all(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name, value in REFUSED_IN_CHAT:
                answer = await http.post("/tokenize", json=GOOD[CHAT] | {name: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            for name, value in ACCEPTED_IN_CHAT:
                assert (await http.post("/tokenize", json=GOOD[CHAT] | {name: value})).status_code == 200

    run(check())


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_what_a_message_asks_for_and_is_not_served_is_refused_by_name(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "fox"}
            old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
            for messages, field in (
                ([asked, old, asked], "messages[1].function_call"),
                ([asked, said | {"prefix": True}], "messages[1].prefix"),  # Mistral, DeepSeek
                ([asked, said | {"partial": True}], "messages[1].partial"),  # Moonshot, DashScope
            ):
                error = (await http.post(path, json={"messages": messages})).json()["error"]
                assert (error["param"], error["message"].partition(": ")[0]) == (field, field)
            for messages in (
                [asked, said | {"function_call": None, "tool_calls": None}, asked],  # as openai writes an answer again
                [asked, said | {"function_call": {}, "prefix": True}, asked | {"prefix": False}],  # done before
                [asked, said | {"prefix": None, "partial": False}],
            ):
                assert (await http.post(path, json={"messages": messages})).status_code == 200

    run(check())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_in_every_chunk_where_that_is_asked_for(tokenizer: Tokenizer, path: str) -> None:
    async def usages(http: httpx.AsyncClient, options: dict[str, Any]) -> list[Any]:
        answer = await http.post(path, json=GOOD[path] | {"stream": True, "stream_options": options, "max_tokens": 3})
        assert answer.status_code == 200
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return [chunk.get("usage", "absent") for chunk in chunks]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            *running, whole = await usages(http, {"include_usage": True, "continuous_usage_stats": True})
            counts = [one["completion_tokens"] for one in running]
            assert counts == sorted(counts)
            assert counts[0] < counts[-1] == whole["completion_tokens"]
            assert {one["prompt_tokens"] for one in running} == {whole["prompt_tokens"]}
            alone = await usages(http, {"continuous_usage_stats": True})
            assert len(alone) == len(running), "no chunk of its own at the end"
            assert alone[-1]["completion_tokens"] == whole["completion_tokens"]
            for value in (False, None):
                *running, last = await usages(http, {"include_usage": True, "continuous_usage_stats": value})
                assert set(running) == {None}
                assert last["completion_tokens"] == whole["completion_tokens"]

    run(check())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_misspelt_field_of_stream_options_is_refused(tokenizer: Tokenizer, path: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post(path, json=GOOD[path] | {"stream": True, "stream_options": {"include_usag": True}})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "stream_options.include_usag")
            assert "did you mean include_usage?" in error["message"]
            absent = {"stream": True, "stream_options": {"include_usag": None}}
            assert (await http.post(path, json=GOOD[path] | absent)).status_code == 200
            answer = await http.post(path, json=GOOD[path] | {"stream": True, "stream_options": {"include_usage": 1}})
            assert answer.json()["error"]["param"] == "stream_options.include_usage"

    run(check())
