"""Tools reach the model through its chat template or are refused; nothing pretends to have offered them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jdisagg.api.http.body import Body
from jdisagg.api.http.messages import render_prompt
from jdisagg.core.errors import InvalidRequest
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving
from tests.unit.text.tiny_tokenizer import train_byte_level

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
PATHS = ("/v1/chat/completions", "/tokenize")


@pytest.fixture
def toolless(tmp_path: Path) -> Tokenizer:
    directory = train_byte_level(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(directory)


def test_tools_that_the_template_does_not_show_are_refused(toolless: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(toolless, "fox"), toolless) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path in PATHS:
                for asked in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}):
                    answer = await http.post(path, json=CHAT | asked)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == "tools"
                for nothing in (
                    {"tools": []},
                    {"tools": None},
                    {"tools": TOOLS, "tool_choice": "none"},
                    {"tool_choice": "auto"},
                ):
                    assert (await http.post(path, json=CHAT | nothing)).status_code == 200

    run(check())


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "weather", "parameters": {}},  # as the Responses API has it
        {"name": "weather", "input_schema": {}},  # as Anthropic's has it
        {"type": "function", "function": {"parameters": {}}},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": "weather"},
    ],
)
def test_a_function_without_a_name_is_refused_with_the_form_that_is_read(tool: dict[str, Any], tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path in PATHS:
                answer = await http.post(path, json=CHAT | {"tools": [*TOOLS, tool]})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[1].function.name")
                assert '{"type": "function", "function": {"name": "f", ' in answer.json()["error"]["message"]
                assert (await http.post(path, json=CHAT | {"tools": [tool], "tool_choice": "none"})).status_code == 200

    run(check())


def test_tools_that_the_template_shows_are_part_of_the_prompt(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for asked, shown in (
                ({"tools": TOOLS}, True),
                ({"tools": TOOLS, "tool_choice": "auto"}, True),
                ({"tools": TOOLS, "tool_choice": "none"}, False),
            ):
                assert (await http.post(PATHS[0], json=CHAT | asked | {"max_tokens": 5})).status_code == 200
                prompt = tokenizer.decode(served.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
                assert ("weather" in prompt) is shown

    run(check())


ARGUMENTS = '{"city": "Köln", "days": 2}'
CALLED = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
OF_CALLS = "{% for m in messages %}{{ m.content }};{% for c in m.tool_calls %}call {{ ARGUMENTS }};{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("way", "arguments", "shown"),
    [
        ("c.function.arguments | tojson", ARGUMENTS, ARGUMENTS),  # Llama 3.1, Qwen 2.5
        ("c.function.arguments.city", ARGUMENTS, "Köln"),
        ("'<' + c.function.arguments + '>'", ARGUMENTS, f"<{ARGUMENTS}>"),  # DeepSeek
        ("c.function.arguments", ARGUMENTS, ARGUMENTS),  # not as Python writes an object
        ("'<' ~ c.function.arguments ~ '>'", ARGUMENTS, f"<{ARGUMENTS}>"),
        ("['<', c.function.arguments | string] | join", ARGUMENTS, f"<{ARGUMENTS}"),
        ("c.function | tojson", ARGUMENTS, f'{{"name": "weather", "arguments": {ARGUMENTS}}}'),  # Mistral
        ("c.function.arguments", "", "{}"),
        ("c.function.arguments | tojson", "", "{}"),
        ("c.function.arguments", "not JSON", "not JSON"),
        ("c.function.arguments", "[1]", "[1]"),
        ("c.function.arguments | length", '{"a": "\\ud800"}', "15"),  # half of a pair: left as it is
        ("c.function.arguments | length", '{"a":' + "[" * 300 + "]" * 300 + "}", "606"),  # deeper than templates can write
    ],
)
def test_arguments_of_calls_are_objects_for_templates_that_want_them(way: str, arguments: str, shown: str) -> None:
    template = ChatTemplate(OF_CALLS.replace("ARGUMENTS", way), {})
    messages = json.loads(json.dumps(CALLED).replace(json.dumps(ARGUMENTS), json.dumps(arguments)))
    assert render_prompt(Body({"messages": messages}), template) == f"hi;;call {shown};rain;"


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}])
@pytest.mark.parametrize("way", ["c.function.arguments | tojson", "c.function.arguments", "'' + c.function.arguments"])
def test_a_call_without_arguments_is_one_of_an_empty_object(arguments: dict[str, None], way: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", **arguments}}
    messages = [CALLED[0], {"role": "assistant", "tool_calls": [call]}, CALLED[2]]
    template = ChatTemplate(OF_CALLS.replace("ARGUMENTS", way), {})
    assert render_prompt(Body({"messages": messages}), template) == "hi;;call {};rain;"


@pytest.mark.parametrize(("arguments", "shown"), [('{"city": "Os', ""), ("[1]", ""), (ARGUMENTS, "city=Köln days=2 ")])
@pytest.mark.parametrize("ids", ["", "{% if m.tool_call_id | length > 9 %}{{ raise_exception('nine') }}{% endif %}"])
def test_a_call_that_is_no_json_does_not_end_a_chat_whose_template_goes_through_arguments(
    arguments: str, shown: str, ids: str
) -> None:
    goes = "''}}{% for name, value in c.function.arguments | items %}{{ name }}={{ value }} {% endfor %}{{''"  # Qwen3-Coder's
    template = ChatTemplate(OF_CALLS.replace("{{ m.content }}", ids + "{{ m.content }}").replace("ARGUMENTS", goes), {})
    messages = json.loads(json.dumps(CALLED).replace(json.dumps(ARGUMENTS), json.dumps(arguments)))
    messages[-1]["tool_call_id"] = LONG_ID
    assert render_prompt(Body({"messages": messages}), template) == f"hi;;call {shown};rain;"


def test_calls_that_the_template_does_not_show_are_refused() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls: the chat template .* shows none to it") as raised:
        render_prompt(Body({"messages": CALLED}), ChatTemplate(plain, {}))
    assert raised.value.field == "messages[1].tool_calls"
    without = [{**message, "tool_calls": []} for message in CALLED]
    assert render_prompt(Body({"messages": without}), ChatTemplate(plain, {})) == "<user>hi<assistant><tool>rain"
    wants = "{{ messages[0].content }} {{ messages[1].tool_calls[0].function.name }}"  # and fails without them
    assert render_prompt(Body({"messages": CALLED}), ChatTemplate(wants, {})) == "hi weather"


PLAIN = "{% for m in messages %}{{ m.content }};{% endfor %}"  # Hermes' default
NO_TOOL_ROLE = PLAIN + "{% for m in messages if m.role == 'tool' %}{{ raise_exception('role') }}{% endfor %}"
OF_TOOLS = "{{ tools | length }}:" + OF_CALLS.replace("ARGUMENTS", "c.function.name")


@pytest.mark.parametrize("plain", [PLAIN, NO_TOOL_ROLE])
@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_earlier_calls_are_shown_by_the_template_for_tools_where_none_are_offered(plain: str, fields: dict[str, Any]) -> None:
    template = ChatTemplate(plain, {}, OF_TOOLS)
    assert render_prompt(Body({"messages": CALLED} | fields), template) == "0:hi;;call weather;rain;"
    assert render_prompt(Body({"messages": CALLED[:1]} | fields), template) == "hi;", "else the model's own"
    shows = OF_CALLS.replace("ARGUMENTS", "1")
    assert render_prompt(Body({"messages": CALLED} | fields), ChatTemplate(shows, {}, OF_TOOLS)) == "hi;;call 1;rain;"
    for of_tools in (PLAIN, "{{ raise_exception('no tools') }}", None):
        with pytest.raises(InvalidRequest, match=r"tool_calls: the chat template|these messages: role"):
            render_prompt(Body({"messages": CALLED} | fields), ChatTemplate(plain, {}, of_tools))


def test_a_template_that_refuses_calls_either_way_is_told_of() -> None:
    template = ChatTemplate(OF_CALLS.replace("ARGUMENTS", "raise_exception('no calls')"), {})
    with pytest.raises(InvalidRequest, match="no calls"):
        render_prompt(Body({"messages": CALLED}), template)


OF_THOSE_WITHOUT_TEXT = (  # DeepSeek's distillations of R1: calls are shown where content is none, and nothing but calls is
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "call {{ c.function.name + c.function.arguments }};{% endfor %}{% elif m.content is not none %}{{ m.content }};{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_call_without_text_is_shown_by_a_template_that_tells_none_from_empty(content: dict[str, str | None]) -> None:
    asked, call, said = CALLED
    messages = [asked, {"role": call["role"], "tool_calls": call["tool_calls"]} | content, said]
    prompt = render_prompt(Body({"messages": messages}), ChatTemplate(OF_THOSE_WITHOUT_TEXT, {}))
    assert prompt == f"hi;call weather{ARGUMENTS};rain;"


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_tool_may_have_nothing_to_tell(content: dict[str, str | None]) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", {})
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "call_1", **content}]
    assert render_prompt(Body({"messages": messages}), template) == "user:hi;tool:;"


@pytest.mark.parametrize(
    "nothing", [{"tool_calls": None}, {"tool_calls": []}, {"name": None, "tool_calls": None, "refusal": None}]
)
@pytest.mark.parametrize("name", ["tool_calls", "name"])
def test_what_a_message_has_as_null_is_not_in_it(nothing: dict[str, list[Any] | None], name: str) -> None:
    template = ChatTemplate(  # Llama 3 looks for tool_calls in the message, and wants one
        f"{{% for m in messages %}}{{% if '{name}' in m %}}{{{{ m.{name} | length }}}}{{{{ raise_exception('one call') }}}}"
        "{% endif %}{{ m.content }};{% endfor %}",
        {},
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fox", **nothing}]
    assert render_prompt(Body({"messages": messages}), template) == "hi;fox;"


LONG_ID = "call_0123456789abcdef"
TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": LONG_ID, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
    },
    {"role": "tool", "tool_call_id": LONG_ID, "content": "rain"},
]
OF_SHORT_IDS = (  # Mistral's
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ c.id }} {{ c.function | tojson }};{% endfor %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}{{ m.tool_call_id }} {% endif %}{{ m.content }};{% endfor %}"
)
OF_NAMES = (  # Hermes'
    "{% for m in messages %}{{ m.tool_calls }}{% if m.role == 'tool' %}{% if m.name is not defined %}"
    "{{ raise_exception('a name') }}{% endif %}{{ m.name }}: {% endif %}{{ m.content }};{% endfor %}"
)


def test_the_second_turn_suits_templates_that_want_short_ids_or_names_of_functions() -> None:
    short = LONG_ID[-9:]
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert render_prompt(Body({"messages": TURN}), ChatTemplate(OF_SHORT_IDS, {})) == f"hi;{short} {call};;{short} rain;"
    assert render_prompt(Body({"messages": TURN}), ChatTemplate(OF_NAMES, {})).endswith("weather: rain;")
    named = [*TURN[:2], {**TURN[2], "name": "mine"}]
    assert render_prompt(Body({"messages": named}), ChatTemplate(OF_SHORT_IDS + OF_NAMES, {})).endswith("mine: rain;")
    shows = "{% for m in messages %}{{ m.tool_calls }}{{ m.name }}{{ m.tool_call_id }}{{ m.content }};{% endfor %}"
    assert render_prompt(Body({"messages": TURN}), ChatTemplate(shows, {})).endswith(f";{LONG_ID}rain;")  # as it came


@pytest.mark.parametrize(
    "odd",
    [
        1,
        "x",
        {"id": 1},
        [1],
        [{"id": [1], "function": {"name": "f"}}],
        [{"id": 1}],
        [{"id": "a"}],
        [{"id": "a", "function": 1}],
    ],
)
def test_calls_that_are_none_are_refused_by_such_a_template_and_nothing_breaks(odd: Any) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": odd}, {"role": "tool", "tool_call_id": 1, "content": "x"}]
    with pytest.raises(InvalidRequest):
        render_prompt(Body({"messages": messages}), ChatTemplate("{{ raise_exception('no') }}", {}))
