"""What a chat template shows to the model is found from the template itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jdisagg.core.errors import ConfigError, InvalidRequest
from jdisagg.text.chat import ChatTemplate

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools }}{% endif %}", True),  # Llama 3
        ("{% set offered = namespace(of=tools) %}{% for tool in offered.of %}{{ tool }}{% endfor %}", True),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}{{ show(tools) }}", True),
        ("{% generation %}{% for m in messages %}{{ tools }}{% break %}{% endfor %}{% endgeneration %}", True),
        ("{# no tools here #}", False),
        ("{{ 'You have no tools.' }}", False),
        ("You have no tools.", False),
        ("{% for m in messages %}{{ m.tools }}{{ m['tools'] }}{% endfor %}", False),
        ("{% set tools_in_user_message = true %}", False),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}", False),
    ],
)
def test_a_template_shows_tools_where_it_reads_them(source: str, shown: bool) -> None:
    assert ChatTemplate(source + TEXT, {}).shows_tools is shown
    assert ChatTemplate(TEXT, {}, source).shows_tools is shown
    assert ChatTemplate("{{ tools }}", {}, source).shows_tools is shown, "its own counts"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1 | no_such_filter }}"])
def test_either_template_is_checked_at_load(source: str) -> None:
    for sources in ((source, None), (TEXT, source)):
        with pytest.raises(ConfigError, match="chat template, line 1"):
            ChatTemplate(sources[0], {}, sources[1])


QWEN = (  # 2.5's, in short: other roles are left out
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "tool_source", "prompt"),
    [
        (QWEN, None, "<system>Be brief.<user>Hi"),
        (QWEN.replace("'system'", "'developer'"), None, "<developer>Be brief.<user>Hi"),
        (QWEN.replace("'system'", "'developer'"), QWEN, "<developer>Be brief.<user>Hi"),
        (QWEN, QWEN.replace("'system'", "'developer'"), "<system>Be brief.<user>Hi"),
    ],
)
def test_a_developer_message_is_a_system_message_for_a_template_that_knows_no_other(
    source: str, tool_source: str | None, prompt: str
) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ChatTemplate(source, {}, tool_source).render(messages) == prompt
    assert messages[0]["role"] == "developer"


STRICT = (  # Qwen3.5's, in short
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LAST_COUNTS = (  # DeepSeek's distillations of R1: of several system messages it shows the last
    "{% set said = namespace(of='') %}{% for m in messages if m.role == 'system' %}{% set said.of = m.content %}{% endfor %}"
    "<system>{{ said.of }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        ("system developer user", "<system>0\n\n1<user>2"),
        ("developer system user", "<system>0\n\n1<user>2"),
        ("developer developer user", "<system>0\n\n1<user>2"),
        ("developer user", "<system>0<user>1"),
    ],
)
@pytest.mark.parametrize("source", [QWEN, STRICT, LAST_COUNTS])
def test_what_developer_and_system_say_first_is_one_system_message(source: str, roles: str, prompt: str) -> None:
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles.split())]
    assert ChatTemplate(source, {}).render(messages) == prompt
    of_parts = source.replace("m.content", "m.content | map(attribute='text') | join('&')")
    assert ChatTemplate(of_parts, {}).render(messages) == prompt.replace("\n\n", "&")


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (QWEN, "<system>0<user>1<system>2<user>3<system>4"),
        (STRICT, "<system>0\n\n2\n\n4<user>1<user>3"),
        (QWEN + "{# developer #}", "<system>0<user>1<user>3<system>4"),
    ],
)
def test_a_later_developer_message_stays_in_its_place_unless_the_template_refuses_it_there(source: str, prompt: str) -> None:
    roles = ("system", "user", "developer", "user", "system")
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    assert ChatTemplate(source, {}).render(messages) == prompt
    with pytest.raises(InvalidRequest, match="refuses these messages: first"):  # the client's own
        ChatTemplate(STRICT, {}).render([message for message in messages if message["role"] != "developer"])


GUARD = (  # Llama Guard's
    "{% for m in messages %}{{ m['role'] }}:{% for content in m['content'] %}{% if content['type'] == 'text' %}"
    "{{ content['text'] | trim }}|{% endif %}{% endfor %};{% endfor %}"
)
FIRST = "{% for m in messages %}{{ m.role }}:{{ m.content[0].text }}|;{% endfor %}"
NO_STRING = "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}{% endfor %}" + GUARD
OF_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system') }}{% endif %}" + GUARD
OF_TURNS = "{% if messages | length < 3 %}{{ raise_exception('turns') }}{% endif %}" + GUARD
OF_STRINGS = "{% for m in messages %}{{ m.role }}:{{ m.content }}|;{% endfor %}"
OF_PLUS = "{% for m in messages %}{{ m.role + ':' + m.content + '|;' }}{% endfor %}"
OF_BOTH = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}|{% else %}"
    "{% for c in m.content %}{{ c.text }}|{% endfor %}{% endif %};{% endfor %}"
)
HISTORY = [{"role": role, "content": f"of {role}"} for role in ("system", "user", "assistant", "tool")]


@pytest.mark.parametrize(
    "source", [GUARD, FIRST, NO_STRING, OF_SYSTEM, OF_TURNS, OF_STRINGS, OF_PLUS, OF_BOTH, OF_SYSTEM.replace(GUARD, OF_PLUS)]
)
def test_a_string_is_shown_by_a_template_of_either_form_whoever_says_it(source: str) -> None:
    shown = "system:of system|;user:of user|;assistant:of assistant|;tool:of tool|;"
    template = ChatTemplate(source, {})
    assert template.render(HISTORY) == shown
    assert template.is_text_shown(of_tools=False)
    assert HISTORY[0] == {"role": "system", "content": "of system"}, "the caller's"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (GUARD, "user:one|two|;"),
        (NO_STRING, "user:one|two|;"),
        (OF_STRINGS, "user:one\ntwo|;"),
        (OF_PLUS, "user:one\ntwo|;"),
        (OF_BOTH, "user:one\ntwo|;"),
    ],
)
def test_parts_stay_parts_for_a_template_that_reads_nothing_else(source: str, shown: str) -> None:
    content = [{"type": "text", "text": text} for text in ("one", "two")]
    assert ChatTemplate(source, {}).render([{"role": "user", "content": content}]) == shown


def test_a_template_for_tools_has_a_form_of_its_own() -> None:
    for plain, of_tools in ((OF_PLUS, GUARD), (GUARD, OF_PLUS)):
        template = ChatTemplate(plain, {}, "{% if not tools %}{{ raise_exception('tools') }}{% endif %}" + of_tools)
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            assert template.render(HISTORY[1:2], tools=tools) == "user:of user|;"
            assert template.is_text_shown(of_tools=tools is not None)


@pytest.mark.parametrize("source", ["", "{{ raise_exception('no') }}", "{{ messages[7].content }}", "{{ range(10 ** 9) }}"])
def test_a_template_that_shows_no_text_or_refuses_all_loads(source: str) -> None:
    template = ChatTemplate(source, {}, OF_STRINGS)
    assert not template.is_text_shown(of_tools=False)
    assert template.is_text_shown(of_tools=True)


@pytest.mark.parametrize("content", [None, [], "absent"])
def test_a_message_without_content_is_rendered_as_it_is(content: Any) -> None:
    message = {"role": "user"} | ({} if content == "absent" else {"content": content})
    source = GUARD.replace("m['content']", "m['content'] or []")
    assert ChatTemplate(source, {}).render([message]) == "user:;"


R1 = (  # the last system message is shown, at the beginning
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
FIRST_ONLY = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + R1.partition("{{ ns.system }}")[2]


@pytest.mark.parametrize("source", [R1, FIRST_ONLY])
def test_a_later_developer_message_is_not_lost_where_one_system_message_is_shown(source: str) -> None:
    roles = ("system", "user", "developer", "user")
    messages = [{"role": role, "content": f"{role[0]}{number}"} for number, role in enumerate(roles)]
    assert ChatTemplate(source, {}).render(messages) == "s0\n\nd2<user>u1<user>u3"


INDENTED = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"
PLAIN = INDENTED.replace("indent=4", "separators=(', ', ': '), indent=none")


def nested(value: Any, depth: int) -> Any:
    return [nested(value, depth - 1)] if depth else value


@pytest.mark.parametrize(
    "tools",
    [
        [nested([1] * 10_000, 50)],
        [nested([1] * 500, 150)] * 10,  # each is short
        [nested([1] * 20_000, 14)] * 30,  # each is wide
    ],
)
def test_no_template_makes_a_long_prompt_of_little_by_indenting_it(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"refuses these messages: as JSON with indents .* nest them less") as refused:
        ChatTemplate(INDENTED, {}).render([], tools=tools)
    assert refused.value.field == "messages"
    assert len(ChatTemplate(PLAIN, {}).render([], tools=tools)) > 3000, "without any they are fine"


@pytest.mark.parametrize(
    "tools",
    [
        [nested({"enum": list(range(100))}, 100)],
        [{"points": [[x % 10, x // 10 % 10] for x in range(50_000)]}],
        [{"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["\u00e9", "\n"]} for i in range(20)}}] * 100,
    ],
)
def test_indents_of_what_tools_have_are_written(tools: list[Any]) -> None:
    expected = "".join(json.dumps(tool, indent=4, ensure_ascii=False) for tool in tools)
    assert ChatTemplate(INDENTED, {}).render([], tools=tools) == expected
    in_macro = "{% macro show(x) %}{{ x | tojson(indent=4) }}{% endmacro %}{% for tool in tools %}{{ show(tool) }}{% endfor %}"
    named_alike: dict[str, Any] = {" room": None}
    assert ChatTemplate(in_macro, {}).render([], tools=tools, **named_alike) == expected
