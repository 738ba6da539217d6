"""Answers of a grammar, through real processes: prefilled on one, decoded on another, and when a grammar means harm."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import psutil
import pydantic
import pytest

from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import Pair
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tries import fair

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["ok", "kind", "count"],
    "additionalProperties": False,
}
CODE = "[a-z]{3}-[0-9]{4}"
FIELDS: dict[str, dict[str, Any]] = {
    "regex": {"structured_outputs": {"regex": CODE}},
    "choice": {"guided_choice": ["yes", "no", "peut-être 😀"]},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "lark": {"structured_outputs": {"grammar": 'start: WORD ("," WORD){2}\nWORD: /[a-z]{1,6}/'}},
}
# None of these does a compiler survive: the first takes its stack, the second for ever, the third gigabytes.
HARMFUL: dict[str, dict[str, Any]] = {
    "stack": {
        "structured_outputs": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'}
    },
    "time": {"guided_json": {"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(20)]}},
    "memory": {"guided_json": {"type": "integer", "multipleOf": 1000003}},
}


def body(fields: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "def f(x):", "max_tokens": 150, "temperature": 0.8, "seed": seed, "n": 2, **fields, **more}


def refused(server: ServerProcess, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The answer, once the checker had the time of a processor that it gives a grammar: else it says that it had none."""
    return fair(
        lambda _: server.post("/v1/completions", asked, timeout_s=150.0),
        lambda got: got[0] == 503,
        "the checker had no processor for as long as it gives a grammar",
        tries=5,
    )


def texts(server: ServerProcess, asked: dict[str, Any]) -> list[tuple[str, str]]:
    status, answer = server.post("/v1/completions", asked)
    assert status == 200, answer
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


@pytest.mark.covers("D22", "V31")
@pytest.mark.parametrize("name", FIELDS)
def test_answers_are_of_their_grammar_and_the_same_on_one_worker_and_on_two(
    name: str, pair: Pair, unified: ServerProcess
) -> None:
    before = pair.decode.metric("jdisagg_transfer_bytes_total")
    asked = [body(FIELDS[name], seed) for seed in range(3)]
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(lambda one: texts(pair.decode, one), asked))
        assert got == list(pool.map(lambda one: texts(unified, one), asked))
    assert pair.decode.metric("jdisagg_transfer_bytes_total") > before
    for text, finish in (choice for choices in got for choice in choices):
        assert finish == "stop"
        match name:
            case "json":
                parsed = json.loads(text)
                assert list(parsed) == ["ok", "kind", "count"]
                assert parsed["count"] <= 99
            case "choice":
                assert text in FIELDS[name]["guided_choice"]
            case "regex":
                assert re.fullmatch(CODE, text)
            case _:
                assert re.fullmatch("[a-z]{1,6}(,[a-z]{1,6}){2}", text)


def test_neighbours_in_the_batch_do_not_notice(unified: ServerProcess) -> None:
    """They have the tokens that they have alone."""
    free = [Asked(prompt=(40 + n,) * 9, sampling={"max_tokens": 60, "seed": n, "ignore_eos": True}) for n in range(3)]
    alone = run_all(unified.grpc, free)
    with ThreadPoolExecutor(1) as pool:
        bound = pool.submit(lambda: [texts(unified, body(FIELDS["json"], seed)) for seed in range(4)])
        assert [one.tokens for one in run_all(unified.grpc, free)] == [one.tokens for one in alone]
        bound.result()


@pytest.mark.parametrize("name", HARMFUL)
def test_a_grammar_that_no_compiler_survives_ends_no_server_and_nobody_elses_answer(name: str, pair: Pair) -> None:
    pids = pair.decode.pid, pair.prefill.pid
    asked = Asked(prompt=tuple(range(40, 60)), sampling={"max_tokens": 100, "seed": 1, "ignore_eos": True})
    wanted = run_all(pair.decode.grpc, [asked])
    with ThreadPoolExecutor(1) as pool:
        harm = pool.submit(refused, pair.decode, body(HARMFUL[name], 1))
        assert run_all(pair.decode.grpc, [asked])[0].tokens == wanted[0].tokens
        status, answer = harm.result()
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert texts(pair.decode, body(FIELDS["regex"], 1))
    assert (pair.decode.pid, pair.prefill.pid) == pids
    assert pair.decode.post("/v1/completions", body(HARMFUL[name], 1))[0] == 400

    def children() -> list[psutil.Process]:
        return psutil.Process(pair.decode.pid).children(recursive=True)

    wait_until(lambda: len(children()) <= 1, 30, "one checker at most")


class Note(pydantic.BaseModel):
    ok: bool
    kind: Literal["a", "b"]


def test_a_public_client_parses_what_it_asked_for(unified: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{unified.http}/v1", api_key="none", timeout=60, max_retries=0) as client:
        answer = client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "note it"}],
            response_format=Note,
            max_tokens=150,
            seed=4,
        )
        note = answer.choices[0].message.parsed
    assert isinstance(note, Note)
    assert note.kind in ("a", "b")
