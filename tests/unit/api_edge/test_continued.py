"""`continue_final_message`: the prompt ends with the text of the last message, as transformers and vLLM end it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from jdisagg.api.http.body import Body
from jdisagg.api.http.messages import render_prompt
from jdisagg.core.errors import InvalidRequest
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving
from tests.unit.text.tiny_tokenizer import train_byte_level

USER = {"role": "user", "content": "hi "}
KEPT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMED = KEPT.replace("m.content", "m.content | trim")
SPACED = "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} <end>{% endfor %}"  # Llama 2's
OF_PARTS = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}<end>{% endfor %}"
TEXTS = ["The answer is", "The answer is ", "  is\n\n", "", " ", "hi", "<end>"]


def prompt_of(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    body = Body({"messages": list(messages), "continue_final_message": True} | fields)
    prompt = render_prompt(body, ChatTemplate(source, {}))
    assert render_prompt(body, ChatTemplate(source, {})) == prompt, "the body is as it was"
    body.refuse_misspelt()
    return prompt


@pytest.mark.parametrize("source", [KEPT, TRIMMED, SPACED, OF_PARTS], ids=["kept", "trimmed", "spaced", "of parts"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_prompt_ends_where_transformers_ends_it(tmp_path_factory: pytest.TempPathFactory, source: str, text: str) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(train_byte_level(tmp_path_factory.mktemp("tiny")))
    last: dict[str, Any] = {"role": "assistant", "content": text}
    messages = [USER, last]
    if source == OF_PARTS:
        messages = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    expected = theirs.apply_chat_template(messages, chat_template=source, continue_final_message=True, tokenize=False)
    assert prompt_of(source, USER, last) == expected
    if source == KEPT:
        assert expected == f"<user>hi <end><assistant>{text}"


@pytest.mark.parametrize("text", ["", "\n"])
def test_what_stands_before_a_message_without_text_stays(text: str) -> None:
    """transformers takes it away, too: the line breaks behind Llama 3's header of an answer."""
    source = TRIMMED.replace("}}>", "}}>:\n")
    assert prompt_of(source, USER, {"role": "assistant", "content": text}) == "<user>:\nhi<end><assistant>:\n"


def test_of_a_message_in_parts_the_last_one_goes_on() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    for content, text in ((parts, "one\ntwo "), (["one", "two"], "one\ntwo"), ([], ""), (None, "")):
        assert prompt_of(KEPT, USER, {"role": "assistant", "content": content}) == f"<user>hi <end><assistant>{text}"
    assert prompt_of(OF_PARTS, USER, {"role": "assistant", "content": parts}) == "<user>hi <end><assistant>onetwo "


ENDS_BARE = "{% for m in messages %}{{ m.role }}{% if not loop.last %}{{ m.content }}{% endif %};{% endfor %}"
THINKS = "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }};{% endfor %}"
TWICE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ messages[-1].content }}"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("source", "last", "fields", "said"),
    [
        (KEPT, USER, {}, "the last message must be an assistant's; got one of 'user'"),
        (KEPT, {"role": "assistant", "content": "x", "tool_calls": [CALL]}, {}, "a message with calls is complete"),
        (KEPT, None, {"add_generation_prompt": True}, "add_generation_prompt begins a message of its own"),
        (ENDS_BARE, None, {}, "does not show the last message as it is"),
        (THINKS, {"role": "assistant", "content": "<think>so</think>it is"}, {}, "does not show the last message as it is"),
        (TWICE, None, {}, "does not show the last message as it is"),
    ],
)
def test_what_cannot_go_on_is_refused(source: str, last: dict[str, Any] | None, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prompt_of(source, USER, last or {"role": "assistant", "content": "so"}, **fields)
    assert refused.value.message.startswith(f"continue_final_message: {said}") or said in refused.value.message
    assert refused.value.field == "continue_final_message"


def test_a_chat_goes_on_and_its_tokens_are_counted_beforehand(tokenizer: Tokenizer) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "the quick"}], "continue_final_message": True}

    async def check() -> None:
        async with (
            serving(FakeEngine(tokenizer, " brown fox"), tokenizer) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            answer = (await http.post("/v1/chat/completions", json=body | {"add_generation_prompt": False})).json()
            assert answer["choices"][0]["message"]["content"] == " brown fox", "what comes behind the message"
            prompt = served.engine.requests[0].prompt_token_ids
            assert tokenizer.decode(prompt, skip_special_tokens=False) == "<s><|user|>hi</s>\n<|assistant|>the quick"
            assert (await http.post("/tokenize", json=body)).json()["tokens"] == list(prompt)
            refused = await http.post("/v1/chat/completions", json=body | {"add_generation_prompt": True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")

    run(check())
