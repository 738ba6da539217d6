"""Tool calls and thoughts over real HTTP: streamed, answered in a second turn, and when a worker dies."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.blows import once
from tests.e2e.conftest import SMALL, starting
from tests.e2e.fleets import Fleet
from tests.e2e.processes import ServerProcess
from tests.e2e.tries import fair

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    '{% for c in m.tool_calls %}\n<tool_call>\n{{ \'{\' }}"name": "{{ c.function.name }}", '
    "\"arguments\": {{ c.function.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>\n{% else %}<think></think>{% endif %}{% endif %}"
)
MARKS = {"<|system|>": "<think>", "<|user|>": "</think>"}  # tokens of the tiny model that get another name
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
ARGUMENTS = '{"city": "Oslo", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router, one prefill and two decode workers of a model that is shown tools and calls, and thinks where it is to."""
    directory = tmp_path_factory.mktemp("chats")
    model = directory / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in MARKS:
            token |= {"content": MARKS[token["content"]], "special": False}
    tokenizer["model"]["vocab"] = {MARKS.get(text, text): number for text, number in tokenizer["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with starting(directory) as start:
        flags = ("--numerics", "exact", *SMALL, "--max-model-len", "512")
        yield Fleet(start=start, model=("--model", str(model)), flags=flags, decode_flags=()).begin(num_routers=1)


def test_a_router_and_a_worker_serve_the_calls_that_the_model_writes(fleet: Fleet) -> None:
    for server in (*fleet.routers, fleet.decode[-1]):
        assert "tool calls are read as hermes, as the chat template writes them" in server.log.read_text()
        with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", timeout=60, max_retries=0) as client:
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


def test_calls_go_on_exactly_when_their_decode_worker_dies(fleet: Fleet) -> None:
    def ask(client: openai.OpenAI, name: str) -> Any:
        more: dict[str, Any] = {"model": client.models.list().data[0].id, "max_tokens": 200, "temperature": 1.0, "seed": 1}
        messages: list[Any] = [{"role": "user", "content": name}]
        return client.chat.completions.create(messages=messages, stream=True, **more, **ASKED[name])

    assert num_replayed(fleet, ask, tuple(ASKED)) > 0


END_BIAS = {"3": 5.0}  # a random model would think for ever
FORM = {"type": "object", "properties": {"n": {"enum": [12, 345]}}, "required": ["n"], "additionalProperties": False}
IN_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
SEEDS = tuple(map(str, range(8)))


def think(client: openai.OpenAI, seed: str, *, stream: bool, thinks: bool = True) -> Any:
    more: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "max_tokens": 300,
        "temperature": 1.0,
        "logit_bias": END_BIAS,
        "response_format": IN_FORM,
    }
    messages: list[Any] = [{"role": "user", "content": f"number {seed}"}]
    variables = {"chat_template_kwargs": {"thinks": thinks}}
    return client.chat.completions.create(messages=messages, seed=int(seed), stream=stream, extra_body=variables, **more)


def test_the_form_of_an_answer_begins_behind_its_thought(fleet: Fleet) -> None:
    for server in (*fleet.routers, fleet.decode[-1]):
        assert "thoughts are read between <think> and </think>" in server.log.read_text()
        with (
            openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", timeout=60, max_retries=0) as client,
            ThreadPoolExecutor(len(SEEDS)) as pool,
        ):
            ends = list(pool.map(whole_as_streamed, [client] * len(SEEDS), SEEDS))
            assert ends.count("stop") > len(SEEDS) / 2
            no_thought = think(client, "1", stream=False, thinks=False).choices[0].message
            assert json.loads(no_thought.content)["n"] in (12, 345)
            assert no_thought.reasoning_content is None


def whole_as_streamed(client: openai.OpenAI, seed: str) -> Any:
    """How the answer ended, at once and in a stream."""
    answer = think(client, seed, stream=False)
    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
    assert answer.usage.completion_tokens_details.reasoning_tokens
    assert json.loads(message.content)["n"] in (12, 345) if finish == "stop" else message.content is None
    streamed = essence(think(client, seed, stream=True))
    assert streamed == {0: [f"({message.reasoning_content}){message.content or ''}", finish]}
    return finish


def test_a_thought_goes_on_exactly_when_its_decode_worker_dies(fleet: Fleet) -> None:
    assert num_replayed(fleet, partial(think, stream=True), SEEDS) > 0


def num_replayed(fleet: Fleet, ask: Callable[[openai.OpenAI, str], Any], names: tuple[str, ...]) -> float:
    """Of what is asked by each of the names, all at once, while the decode worker of one of them dies: all of it must come as
    before."""
    [router] = fleet.routers
    with (
        openai.OpenAI(base_url=f"{router.http}/v1", api_key="none", timeout=60, max_retries=0) as client,
        ThreadPoolExecutor(len(names)) as pool,
    ):

        def answer(name: str) -> dict[int, list[str]]:
            return essence(ask(client, name))

        undisturbed = list(pool.map(answer, names))
        before = router.metric("jdisagg_recoveries_total", rung="replay")
        victims: list[ServerProcess] = []

        def replayed(_: int) -> float:
            for dead in victims:
                fleet.replace(dead)
            others = [pool.submit(answer, name) for name in names]
            begun: list[str] = []

            def look() -> bool:
                flights = router.state()["flights"]
                begun.extend(flight["worker"] for flight in flights if flight["worker"] and flight["delivered"] > 20)
                return bool(begun)

            once(look, "tokens have come")
            [struck, *_] = [*begun, fleet.decode[-1].grpc]
            victims[:] = [worker for worker in fleet.decode if worker.grpc == struck]
            victims[0].kill()
            assert [other.result() for other in others] == undisturbed
            return router.metric("jdisagg_recoveries_total", rung="replay") - before

        try:
            return fair(replayed, lambda count: count == 0, "every stream had ended when the blow fell")
        finally:
            for dead in victims:
                fleet.replace(dead)


def essence(chunks: Iterable[Any]) -> dict[int, list[str]]:
    """All of each choice but for the ids of its calls: thought, names, arguments and content as one text, and how it ended."""
    thoughts, texts, ends = defaultdict[int, str](str), defaultdict[int, str](str), defaultdict[int, str](str)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        index, delta = choice.index, choice.delta
        thoughts[index] += delta.reasoning_content or ""
        texts[index] += delta.content or ""
        for part in delta.tool_calls or ():
            begins = part.id is not None
            texts[index] += (f"<{part.index}: {part.function.name}>" if begins else "") + part.function.arguments
        ends[index] += choice.finish_reason or ""
    return {index: [f"({thoughts[index]}){texts[index]}", end] for index, end in ends.items()}
