"""Whether, and how much, a model is to think is told to its template, by whichever field it is said."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.api.http.body import Body
from jdisagg.api.http.messages import render_prompt
from jdisagg.core.errors import InvalidRequest
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

MESSAGES = [{"role": "user", "content": "hi"}]
SHOWS = "{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }}:{{ messages[0].content }}"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def prompt_of(template: str, fields: dict[str, Any]) -> str:
    return render_prompt(Body({"messages": MESSAGES} | fields), ChatTemplate(template, {}))


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (ON, ",True,True"),
        (OFF, ",False,False"),
        ({"think": True}, ",True,True"),
        ({"think": False}, ",False,False"),
        ({"think": ""}, ",,"),
        ({"thinking": {"type": "enabled"}}, ",True,True"),
        ({"thinking": {"type": "disabled", "budget_tokens": None}}, ",False,False"),
        ({"thinking": {"type": "auto"}}, ",,"),
        ({"reasoning": {"effort": "high"}}, "high,True,"),
        ({"reasoning": {"effort": "none", "exclude": False}}, "none,False,"),
        ({"reasoning": {"enabled": False}}, ",False,False"),
        ({"reasoning": {"effort": "low", "enabled": True, "exclude": False}}, "low,True,True"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "low,True,"),
        ({"reasoning": {"effort": None}, "reasoning_effort": "low"}, "low,True,"),
        ({"reasoning_effort": "high"} | OFF, "high,False,False"),
        ({"reasoning_effort": "none", "think": True}, "none,True,True"),
        ({"thinking_budget": 19456}, ",,"),
        (ON | {"thinking_budget": 19456}, ",True,True"),
        (OFF | {"thinking": {"type": "disabled"}, "chat_template_kwargs": OFF | {"thinking": False}}, ",False,False"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": OFF}, ",False,False"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": ON}, ",True,"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, ",,True"),
        ({"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}}, "high,True,"),
        ({"chat_template_args": OFF}, ",False,"),
        ({"chat_template_args": OFF, "chat_template_kwargs": OFF}, ",False,"),
        ({"chat_template_args": OFF, "chat_template_kwargs": None}, ",False,"),
        ({"think": True, "chat_template_args": OFF}, ",False,"),
    ],
)
def test_what_is_said_of_thinking_is_told_to_the_template(fields: dict[str, Any], shown: str) -> None:
    assert prompt_of(SHOWS, fields) == f"{shown}:hi"
    assert prompt_of("{{ messages[0].content }}", fields) == "hi", "one that does not ask goes on as without"


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        (ON | {"think": False}, "think", "says the opposite of enable_thinking"),
        (OFF | {"thinking": {"type": "enabled"}}, "thinking", "says the opposite of enable_thinking"),
        ({"think": True, "thinking": {"type": "disabled"}}, "think", "says the opposite of thinking"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning", "must equal reasoning_effort = high"),
        ({"chat_template_args": OFF, "chat_template_kwargs": ON}, "chat_template_args", "must equal chat_template_kwargs"),
        ({"chat_template_args": {"messages": []}}, "chat_template_args", "messages cannot be given there"),
        ({"thinking": {"type": "adaptive"}}, "thinking", "one of enabled, disabled, auto"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning", "one of none, minimal, low"),
        ({"think": "high"}, "think", "must be true or false"),
    ],
)
def test_contradictions_and_other_values_are_refused(fields: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        prompt_of(SHOWS, fields)
    assert raised.value.field == field
    assert raised.value.message.startswith(f"{field}: ")
    assert told in raised.value.message


def test_messages_are_tokenized_with_what_is_said_of_thinking(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is false %} the fox{% endif %}"
    monkeypatch.setattr(tokenizer, "chat", ChatTemplate(source, {}))

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            prompts = []
            for fields in ({}, OFF, {"think": False}, {"thinking": {"type": "disabled"}}, {"reasoning": {"effort": "none"}}):
                body = {"messages": MESSAGES} | fields
                tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
                assert tuple(tokens) == served.engine.requests[-1].prompt_token_ids
                prompts.append(tokens)
            assert prompts[0] != prompts[1]
            assert prompts[1:] == [prompts[1]] * 4

    run(check())
