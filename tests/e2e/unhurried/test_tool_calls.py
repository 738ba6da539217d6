"""Tool calls over real HTTP, the model's own and forced ones: streamed, answered in a second turn, and when a worker dies."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import SMALL, Start
from tests.e2e.processes import wait_until

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    '{% for c in m.tool_calls %}\n<tool_call>\n{{ \'{\' }}"name": "{{ c.function.name }}", '
    "\"arguments\": {{ c.function.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
ARGUMENTS = '{"city": "Oslo", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture
def flags(tiny_model: Path, tmp_path: Path) -> tuple[str, ...]:
    """Of a model that is shown tools and calls."""
    model = tmp_path / "calling"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return ("--model", str(model), *SMALL, "--max-model-len", "512")


def test_a_router_serves_the_calls_that_the_model_writes(start: Start, flags: tuple[str, ...]) -> None:
    fleet = start("local", "--role", "local", *flags).wait_ready()
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


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city", "days"]}
FORCED = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
ASKED: dict[str, dict[str, Any]] = {
    "the model's own": {"tools": TOOLS, "extra_body": {"structured_outputs": {"choice": [f"I look.\n{CALL}\n{CALL}"]}}},
    "required": {"tools": FORCED, "tool_choice": "required", "n": 2},
    "by name": {"tools": FORCED, "tool_choice": {"type": "function", "function": {"name": "time"}}},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
}


def test_calls_go_on_exactly_when_their_decode_worker_dies(start: Start, flags: tuple[str, ...]) -> None:
    router = start("router", "--role", "router", *flags[:2]).wait_ready()
    exact = ("--router", router.grpc, "--numerics", "exact", *flags)
    workers = [start("prefill", "--role", "prefill", *exact), *(start("decode", "--role", "decode", *exact) for _ in range(2))]
    for worker in workers:
        worker.wait_ready()
    wait_until(lambda: len(router.state()["members"]) == len(workers), 20, "all workers have come")
    with (
        openai.OpenAI(base_url=f"{router.http}/v1", api_key="none", timeout=60, max_retries=0) as client,
        ThreadPoolExecutor(len(ASKED)) as pool,
    ):

        def answer(name: str) -> dict[int, list[str]]:
            more: dict[str, Any] = {"model": client.models.list().data[0].id, "max_tokens": 200, "temperature": 1.0, "seed": 1}
            messages: list[Any] = [{"role": "user", "content": name}]
            return essence(client.chat.completions.create(messages=messages, stream=True, **more, **ASKED[name]))

        undisturbed = list(pool.map(answer, ASKED))
        others = [pool.submit(answer, name) for name in ASKED]
        wait_until(lambda: any(flight["delivered"] > 20 for flight in router.state()["flights"]), 30, "tokens have come")
        [victim, *_] = [flight["worker"] for flight in router.state()["flights"] if flight["delivered"]]
        next(worker for worker in workers if worker.grpc == victim).kill()
        assert [other.result() for other in others] == undisturbed
    assert router.metric("jdisagg_recoveries_total", rung="replay") > 0


def essence(chunks: Iterable[Any]) -> dict[int, list[str]]:
    """All of each choice but for the ids of its calls: names, arguments and content as one text, and how it ended."""
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = found.setdefault(choice.index, ["", ""])
            said[0] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                begins = part.id is not None
                said[0] += (f"<{part.index}: {part.function.name}>" if begins else "") + part.function.arguments
            said[1] += choice.finish_reason or ""
    return found
