"""A model that thinks before it answers in a form: whole, streamed, and when its decode worker dies in the thought."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    "{% for m in messages %}<|assistant|>{{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}"
)
MARKS = {"<|system|>": "<think>", "<|user|>": "</think>"}  # tokens of the tiny model that get another name
END_ID = "3"
BIAS = {END_ID: 5.0}  # a random model would think for ever
SCHEMA = {"type": "object", "properties": {"n": {"enum": [12, 345]}}, "required": ["n"], "additionalProperties": False}
IN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
SEEDS = range(8)


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router, one prefill and two decode workers of a model whose prompts begin a thought."""
    directory = tmp_path_factory.mktemp("thinking")
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


def asked(client: openai.OpenAI, seed: int) -> dict[str, Any]:
    model = client.models.list().data[0].id
    more: dict[str, Any] = {"model": model, "max_tokens": 300, "temperature": 1.0, "seed": seed, "logit_bias": BIAS}
    return more | {"messages": [{"role": "user", "content": f"number {seed}"}], "response_format": IN_SCHEMA}


def test_the_form_of_an_answer_begins_behind_its_thought(fleet: Fleet) -> None:
    for server in (*fleet.routers, fleet.decode[-1]):
        assert "thoughts are read between <think> and </think>" in server.log.read_text()
        with (
            openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", timeout=60, max_retries=0) as client,
            ThreadPoolExecutor(len(SEEDS)) as pool,
        ):
            ends = list(pool.map(lambda seed, client=client: whole_as_streamed(client, seed), SEEDS))
            assert ends.count("stop") > len(SEEDS) / 2
            no_thought = client.chat.completions.create(**asked(client, 1), extra_body={"enable_thinking": False}).choices[0]
            assert json.loads(no_thought.message.content or "")["n"] in (12, 345)
            assert "reasoning_content" not in (no_thought.message.model_extra or {})


def whole_as_streamed(client: openai.OpenAI, seed: int) -> str:
    """How the answer ended, at once and in a stream."""
    answer = client.chat.completions.create(**asked(client, seed))
    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
    thought = (message.model_extra or {})["reasoning_content"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens
    if finish == "stop":
        assert json.loads(message.content or "")["n"] in (12, 345)
    else:
        assert message.content is None
    assert essence(client.chat.completions.create(**asked(client, seed), stream=True)) == [
        thought,
        message.content or "",
        finish,
    ]
    return finish


def test_a_thought_goes_on_exactly_when_its_decode_worker_dies(fleet: Fleet) -> None:
    [router] = fleet.routers
    with (
        openai.OpenAI(base_url=f"{router.http}/v1", api_key="none", timeout=60, max_retries=0) as client,
        ThreadPoolExecutor(len(SEEDS)) as pool,
    ):

        def answer(seed: int) -> list[str]:
            return essence(client.chat.completions.create(**asked(client, seed), stream=True))

        undisturbed = list(pool.map(answer, SEEDS))
        victims: list[ServerProcess] = []

        def replayed(_: int) -> float:
            for dead in victims:
                fleet.replace(dead)
            others = [pool.submit(answer, seed) for seed in SEEDS]
            begun: list[str] = []

            def look() -> bool:
                flights = router.state()["flights"]
                begun.extend(flight["worker"] for flight in flights if flight["worker"] and flight["delivered"] > 10)
                return bool(begun)

            once(look, "tokens have come")
            [struck, *_] = [*begun, fleet.decode[-1].grpc]
            victims[:] = [worker for worker in fleet.decode if worker.grpc == struck]
            victims[0].kill()
            assert [other.result() for other in others] == undisturbed
            return router.metric("jdisagg_recoveries_total", rung="replay")

        assert fair(replayed, lambda count: count == 0, "every stream had ended when the blow fell") > 0


def essence(chunks: Iterable[Any]) -> list[str]:
    """The thought, the content, and how the answer ended."""
    found = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            found[0] += (choice.delta.model_extra or {}).get("reasoning_content", "")
            found[1] += choice.delta.content or ""
            found[2] += choice.finish_reason or ""
    return found
