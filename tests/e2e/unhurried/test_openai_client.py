"""The public `openai` client against three ways of serving: unified, decode without router, router + 1P + 1D. Same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import PATIENT, Pair, starting
from tests.e2e.processes import ServerProcess

PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a loop."}]
EXACT = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
DRAWN = {"temperature": 1.0, "top_p": 0.95, "seed": 1234, "extra_body": {"ignore_eos": True}}
Clients = dict[str, openai.OpenAI]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, exact_flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    """`--role local`: what a newcomer starts."""
    with starting(tmp_path_factory.mktemp("local")) as start:
        yield start("local", "--role", "local", "--local-prefill", "never", *PATIENT, *exact_flags).wait_ready()


@pytest.fixture(scope="module")
def clients(unified: ServerProcess, pair: Pair, local: ServerProcess) -> Iterator[Clients]:
    servers = {"unified": unified, "decode": pair.decode, "local": local}
    found = {
        name: openai.OpenAI(base_url=server.http + "/v1", api_key="unused", timeout=60, max_retries=0)
        for name, server in servers.items()
    }
    yield found
    for client in found.values():
        client.close()


def model_of(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


def same_everywhere(clients: Clients, ask: Callable[[openai.OpenAI, str], Any]) -> Any:
    """The answer that every server gives."""
    answers = {name: ask(client, model_of(client)) for name, client in clients.items()}
    assert answers["decode"] == answers["unified"]
    assert answers["local"] == answers["unified"]
    return answers["unified"]


def usage_of(answer: Any) -> tuple[int, int, int]:
    return answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens


def test_completion_with_usage_and_logprobs(clients: Clients) -> None:
    def ask(client: openai.OpenAI, model: str) -> Any:
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, logprobs=2, **EXACT)
        [choice] = answer.choices
        assert answer.model == model
        assert choice.logprobs is not None
        return choice.text, choice.finish_reason, usage_of(answer), choice.logprobs.tokens, choice.logprobs.token_logprobs

    text, finish, usage, tokens, logprobs = same_everywhere(clients, ask)
    assert finish == "length"
    assert usage[1] == len(tokens) == len(logprobs) == 24
    assert usage[2] == usage[0] + 24
    assert "".join(tokens) == text
    assert all(logprob <= 0 for logprob in logprobs)


def test_streamed_completion_is_the_whole_one_in_pieces(clients: Clients) -> None:
    def ask(client: openai.OpenAI, model: str) -> Any:
        whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, **DRAWN)
        options: Any = {"include_usage": True}
        chunks = list(
            client.completions.create(model=model, prompt=PROMPT, max_tokens=24, stream=True, stream_options=options, **DRAWN)
        )
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(piece.text for piece in pieces) == whole.choices[0].text
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
        assert usage_of(chunks[-1]) == usage_of(whole)
        assert len(pieces) > 3
        return whole.choices[0].text, usage_of(whole)

    text, _ = same_everywhere(clients, ask)
    assert text


def test_chat_whole_and_streamed(clients: Clients) -> None:
    def ask(client: openai.OpenAI, model: str) -> Any:
        whole = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=20, **EXACT)
        stream = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=20, stream=True, **EXACT)
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        [choice] = whole.choices
        assert choice.message.role == deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == choice.message.content
        return choice.message.content, choice.finish_reason, usage_of(whole)

    content, finish, usage = same_everywhere(clients, ask)
    assert content
    assert finish == "length"
    assert usage[1] == 20


def test_n_choices_are_seeded_and_different(clients: Clients) -> None:
    def ask(client: openai.OpenAI, model: str) -> Any:
        one, again = (client.completions.create(model=model, prompt=PROMPT, n=3, max_tokens=12, **DRAWN) for _ in range(2))
        texts = [choice.text for choice in one.choices]
        assert texts == [choice.text for choice in again.choices]
        assert [choice.index for choice in one.choices] == [0, 1, 2]
        return texts, usage_of(one)

    texts, usage = same_everywhere(clients, ask)
    assert len(set(texts)) == 3
    assert usage[1] == 36


def test_stop_string_ends_and_is_left_out(clients: Clients) -> None:
    first = clients["unified"]
    free = first.completions.create(model=model_of(first), prompt=PROMPT, max_tokens=24, **EXACT).choices[0].text
    stop = free[8:11]
    assert "\ufffd" not in free[:11]

    def ask(client: openai.OpenAI, model: str) -> Any:
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, stop=[stop], **EXACT)
        return answer.choices[0].text, answer.choices[0].finish_reason

    text, finish = same_everywhere(clients, ask)
    assert text == free[: free.index(stop)]
    assert finish == "stop"


def test_provenance_names_the_processes(clients: Clients, pair: Pair, local: ServerProcess) -> None:
    pids = {worker["role"]: worker["pid"] for worker in local.ready.workers}
    prompt = [17 + number % 900 for number in range(37)]
    found = {}
    for name, client in clients.items():
        answer = client.completions.create(
            model=model_of(client), prompt=prompt, max_tokens=3, extra_headers={"x-jdisagg-provenance": "1"}, **EXACT
        )
        assert answer.model_extra is not None
        assert answer.usage is not None
        [found[name]] = answer.model_extra["jdisagg"]["choices"]
        assert found[name]["prefilled_tokens"] == len(prompt)
    assert found["unified"]["prefill_worker"] == ""
    assert found["unified"]["transferred_tokens"] == 0
    for name, prefill, decode in (
        ("decode", pair.prefill.pid, pair.decode.pid),
        ("local", pids["prefill"], pids["decode"]),
    ):
        assert found[name]["prefill_worker"].startswith(f"pid {prefill} ")
        assert found[name]["decode_worker"].startswith(f"pid {decode} ")
        assert found[name]["transferred_tokens"] == len(prompt)
        assert found[name]["transferred_bytes"] > 0
