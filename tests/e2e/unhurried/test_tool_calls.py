"""Tool calls that the model writes of its own accord, over real HTTP: found, streamed, and answered in a second turn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import openai

from tests.e2e.conftest import SMALL, Start

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    '{% for c in m.tool_calls %}\n<tool_call>\n{{ \'{\' }}"name": "{{ c.function.name }}", '
    "\"arguments\": {{ c.function.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
ARGUMENTS = '{"city": "Oslo", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def test_a_router_serves_the_calls_that_the_model_writes(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "calling"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    fleet = start("local", "--role", "local", "--model", str(model), *SMALL, "--max-model-len", "512").wait_ready()
    decode = next(worker["http"] for worker in fleet.ready["workers"] if worker["role"] == "decode")
    assert "tool calls are read as hermes, as the chat template writes them" in fleet.log.read_text()
    for url in (fleet.http, f"http://{decode}"):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client:
            two_turns(client)


def two_turns(client: openai.OpenAI) -> None:
    """A tiny model writes a call when its grammar allows nothing else."""
    written = {"structured_outputs": {"choice": [f"I look.\n{CALL}"]}}
    asked: list[Any] = [{"role": "user", "content": "Oslo?"}]
    more: dict[str, Any] = {"model": client.models.list().data[0].id, "tools": TOOLS, "max_tokens": 120}
    answer = client.chat.completions.create(messages=asked, extra_body=written, **more).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "I look.")
    assert answer.message.tool_calls is not None
    [call] = answer.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    with client.chat.completions.stream(messages=asked, extra_body=written, **more) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.")
    assert streamed.message.tool_calls is not None
    [again] = streamed.message.tool_calls
    assert (again.function.name, again.function.arguments) == ("weather", ARGUMENTS)
    told = [*asked, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(messages=told, extra_body={"structured_outputs": {"choice": ["Rain."]}}, **more)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "Rain.")
    assert second.choices[0].message.tool_calls is None
    plain = client.chat.completions.create(messages=asked, tool_choice="none", extra_body=written, **more).choices[0]
    assert (plain.finish_reason, plain.message.content) == ("stop", f"I look.\n{CALL}")
