"""The format of a model's calls is the one that its chat template writes."""

from __future__ import annotations

import logging

import pytest

from jdisagg.api.http.call_format import choose_call_format
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.chat import ChatTemplate

TOOLS = "{% if tools %}{{ tools | tojson }} <tool_call></tool_call> {% endif %}"
ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CHATML = (
    TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
)
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
QWEN = f'<tool_call>\n{{{{ "{{" }}}}"name": "{NAME}", "arguments": {ARGUMENTS}{{{{ "}}" }}}}\n</tool_call>'
HERMES = f'<tool_call>\n{{{{ "{{" }}}}"arguments": {ARGUMENTS}, "name": "{NAME}"{{{{ "}}" }}}}\n</tool_call>'
LLAMA = f'{{{{ "{{" }}}}"name": "{NAME}", "parameters": {ARGUMENTS}{{{{ "}}" }}}}'
CODER = f"<tool_call>\n<function={NAME}>\n</function>\n</tool_call>"
BEFORE = "[TOOL_CALLS] [{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
MISTRAL = BEFORE + '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"{{ \'}\' }}]'
NEW_MISTRAL = f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}"


@pytest.mark.parametrize(
    ("call", "prompt", "found"),
    [
        (QWEN, ASSISTANT, "hermes"),
        (QWEN, THINKING, "hermes"),
        (HERMES, ASSISTANT, "hermes"),
        (LLAMA, ASSISTANT, "llama3_json"),
        (MISTRAL, "", "mistral"),
        (NEW_MISTRAL, "", "mistral"),
        (CODER, ASSISTANT, None),
        (f"{LLAMA}{LLAMA}", ASSISTANT, None),
        ("", ASSISTANT, None),
        ("{{ raise_exception('no calls') }}", ASSISTANT, None),
    ],
)
def test_the_format_is_found_from_the_template(
    call: str, prompt: str, found: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(CHATML.replace("CALL", call) + prompt, {})
    with caplog.at_level(logging.INFO):
        assert choose_call_format("auto", template) is (None if found is None else FORMATS[found])
    if found is None:
        assert "tool calls stay text: the chat template " in caplog.text
        assert "name the model's with --tool-call-parser" in caplog.text
    else:
        assert f"read as {found}, as the chat template writes them" in caplog.text
    assert choose_call_format("none", template) is None
    assert choose_call_format("mistral", template) is FORMATS["mistral"]


def test_of_a_model_that_is_shown_no_tools_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for template in (None, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})):
            assert choose_call_format("auto", template) is None
    assert not caplog.records
