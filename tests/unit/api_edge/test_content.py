"""All text of a chat's messages reaches the model, in whichever form it comes and the template reads it; or it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

OF_STRINGS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}|{% endif %}{% endfor %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %};{% endfor %}"
)
REFUSED = [{"type": "text", "text": "No."}, {"type": "refusal", "refusal": "I won't."}]


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def prompt_of(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    return render_prompt(Body({"messages": list(messages)} | fields), ChatTemplate(source, {}))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([part("one"), part("two"), part("three")], "one\ntwo\nthree"),
        ([part("one\n"), part(""), part("two")], "one\n\n\ntwo"),
        ([part("one")], "one"),
        ([part("")], ""),
        ([], ""),
        (["one", "two"], "one\ntwo"),
        (["one", part("two")], "one\ntwo"),
        ([part("one") | {"type": "input_text"}, part("two") | {"type": "output_text"}], "one\ntwo"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_are_lines_of_one_string(role: str, content: list[str | dict[str, str]], text: str) -> None:
    messages = {"role": "user", "content": "hi"}, {"role": role, "content": content}
    assert prompt_of(OF_STRINGS, *messages) == f"user:hi;{role}:{text};"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (REFUSED[1:], "I won't."),
        ([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, part("Yes.")], "Hm.\nYes."),  # litellm's hosted_vllm
    ],
)
def test_a_refusal_or_a_thought_in_a_history_is_what_the_assistant_said(content: list[dict[str, str]], text: str) -> None:
    messages = {"role": "user", "content": "hi"}, {"role": "assistant", "content": content}
    assert prompt_of(OF_STRINGS, *messages) == f"user:hi;assistant:{text};"


@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ({"reasoning": "Hm."}, "Hm."),
        ({"reasoning_content": "Hm."}, "Hm."),
        ({"reasoning_content": "", "reasoning": "Hm."}, "Hm."),
        ({"reasoning_content": None, "reasoning": "Hm."}, "Hm."),
        ({"reasoning": None}, None),
        ({}, None),
    ],
)
def test_what_an_assistant_thought_is_shown_whichever_name_the_template_reads(
    read: str, sent: dict[str, str | None], shown: str | None
) -> None:
    source = f"{{% for m in messages %}}{{{{ m.{read} if '{read}' in m else 'nothing' }}}};{{{{ m.content }}}};{{% endfor %}}"
    asked, said = {"role": "user", "content": "hi", "reasoning": "no"}, {"role": "assistant", "content": "Yes."}
    assert prompt_of(source, asked, said | sent).endswith(f"hi;{shown or 'nothing'};Yes.;")
    other = "reasoning" if read == "reasoning_content" else "reasoning_content"
    assert prompt_of(source, said | {read: "a", other: "b"}) == "a;Yes.;", "as they came"
    assert (prompt_of(source, asked) == "nothing;hi;") is (read == "reasoning_content"), "of an assistant alone"
    assert prompt_of(source, said | {other: ""}) == "nothing;Yes.;", "some look whether it is there"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": REFUSED}, "only parts of type 'text' are served; got \"refusal\""),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, 'got "refusal"'),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": None}]}, 'got "refusal"'),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}]}, 'got "thinking"'),
        ({"role": "assistant", "content": [{"type": "thinking", "text": "Hm."}]}, 'got "thinking"'),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, 'got "image_url"'),
        ({"role": "user", "content": [{"type": "input_image", "text": "x"}]}, 'got "input_image"'),
        ({"role": "user", "content": [{"type": "input_text", "input_text": "x"}]}, 'got "input_text"'),
        ({"role": "user", "content": [["hi"]]}, r'must be objects or strings; got \["hi"\]'),
        ({"role": "assistant", "content": [{"type": ["refusal"], "refusal": "no"}]}, r'got \["refusal"\]'),
    ],
)
def test_parts_without_text_are_refused(message: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content: .*{told}") as caught:
        prompt_of(OF_STRINGS, message)
    assert caught.value.field == "messages[0].content"


@pytest.mark.parametrize("field", ["a part", "its type", "a name"])
def test_of_a_wrong_list_of_many_no_more_is_written_than_shown(field: str) -> None:
    class Many(list[int]):
        num_read = 0

        def __repr__(self) -> str:
            pytest.fail("all of it is written")

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                self.num_read += 1
                yield number

    many = Many(range(100_000))
    message: dict[str, Any] = {"role": "user", "content": [{"a part": many, "its type": {"type": many}}.get(field, "hi")]}
    tools = [{"type": "function", "function": {"name": many if field == "a name" else "f"}}]
    with pytest.raises(InvalidRequest, match=r"got \[0, 1, 2, .*\.\.\.$") as caught:
        prompt_of(OF_STRINGS + "{{ tools[0].function.name }}", message, tools=tools)
    assert many.num_read < 100
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one", "one|"),
        ("", "|"),
        (["one", "two"], "one|two|"),
        ([part("one") | {"type": "input_text"}], "one|"),
        ([part("one"), part("two")], "one|two|"),
        ([part("one") | {"id": 1}], "one|"),
        ([], ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_a_template_of_parts_is_given_parts(role: str, content: str | list[Any], text: str) -> None:
    shown = "system" if role == "developer" else role  # of which the template has not heard
    assert prompt_of(OF_PARTS, {"role": role, "content": content}) == f"{shown}:{text};"
    only = OF_PARTS.replace("c.type == 'text'", "c == {'type': 'text', 'text': c.text}")
    assert prompt_of(only, {"role": role, "content": content}) == f"{shown}:{text};"


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_calls_and_results_are_shown_by_a_template_of_parts(content: dict[str, str | None]) -> None:
    said = {"role": "assistant", "tool_calls": [CALL], **content}
    prompt = prompt_of(OF_PARTS, {"role": "user", "content": "hi"}, said, {"role": "tool", "content": "rain"})
    empty = "|" if content.get("content") == "" else ""
    assert prompt == f"user:hi|;assistant:{empty}weather;tool:rain|;"
    refused = {"role": "assistant", "content": REFUSED}
    assert prompt_of(OF_PARTS, refused) == "assistant:No.|I won't.|;"


@pytest.mark.parametrize("source", ["Say it.", "{% for m in messages %}{{ m.text }}{% endfor %}", "{{ messages[2].role }}"])
@pytest.mark.parametrize("content", ["hi", [part("hi")]])
def test_text_that_the_template_does_not_show_is_refused(source: str, content: str | list[dict[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
    with pytest.raises(InvalidRequest, match="the chat template of the served model shows none of their text") as caught:
        prompt_of(source, *messages)
    assert caught.value.field == "messages"
    without = [message | {"content": ""} for message in messages]
    assert prompt_of(source, *without) in ("Say it.", "", "user"), "nothing is missing"


def test_a_template_of_other_conversations_than_were_tried_is_served() -> None:
    of_roles = "{% for m in messages if m.role in ('query', 'document') %}{{ m.content }};{% endfor %}"
    assert prompt_of(of_roles, {"role": "query", "content": "fox?"}, {"role": "document", "content": "fox"}) == "fox?;fox;"
    of_variables = "{% if template %}{{ messages[0].content }}{% endif %}"
    assert prompt_of(of_variables, {"role": "user", "content": "hi"}, chat_template_kwargs={"template": 1, "form": 1}) == "hi"
    wants_text = "{% if not messages[0].content %}{{ raise_exception('text') }}{% endif %}Say it."
    assert prompt_of(wants_text, {"role": "user", "content": "hi"}) == "Say it."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_chat_for_a_template_of_parts_is_served(tmp_path: Path, path: str) -> None:
    directory = train_byte_level(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": OF_PARTS}))
    tokenizer = Tokenizer.from_directory(directory)

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post(path, json={"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5})
            assert answer.status_code == 200
            asked = [list(request.prompt_token_ids) for request in served.engine.requests]
            (ids,) = asked or [answer.json()["tokens"]]
            assert tokenizer.decode(ids) == "user:the fox|;"

    run(check())


THINKING = "{{ reasoning_effort }},{{ enable_thinking }}:{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ","),
        ({"reasoning_effort": None}, ","),
        ({"reasoning_effort": "none"}, "none,False"),
        *(({"reasoning_effort": effort}, f"{effort},True") for effort in ("minimal", "low", "medium", "high", "xhigh", "max")),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none,True"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low,False"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high,True"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ",False"),
    ],
)
def test_reasoning_effort_is_told_to_the_template_and_none_switches_thinking_off(fields: dict[str, Any], shown: str) -> None:
    assert prompt_of(THINKING, {"role": "user", "content": "hi"}, **fields) == f"{shown}:hi"
    assert prompt_of(OF_STRINGS, {"role": "user", "content": "hi"}, **fields) == "user:hi;"
