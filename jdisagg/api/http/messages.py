"""OpenAI chat messages to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from jdisagg.api.http.body import Body, beginning
from jdisagg.api.http.continued import CONTINUES, up_to_mark, with_mark
from jdisagg.api.http.earlier_calls import check_structure, with_arguments, with_objects
from jdisagg.api.http.template_variables import read_variables
from jdisagg.api.http.tools import read_forced, read_functions
from jdisagg.api.http.unserved import LAST_MESSAGE_FIELDS, MESSAGE_FIELDS, refuse_unserved
from jdisagg.core.errors import InvalidRequest
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.content_form import text_part

_ID_LENGTH = 9
_NO_TEXT = ("", [], [text_part("")])
_TEXT_PARTS = ("text", "input_text", "output_text")  # the latter as in OpenAI's Responses
_ASSISTANT_PARTS = ("refusal", "thinking")  # whose text has their name
THOUGHT_FIELDS = ("reasoning_content", "reasoning")  # DeepSeek's and SGLang's, vLLM's and OpenRouter's


def render_prompt(body: Body, template: ChatTemplate | None) -> str:
    """The prompt text of `messages` (and `tools`). Raises InvalidRequest naming the field."""
    messages = body.objects("messages")
    if not messages:
        raise InvalidRequest.of("messages", "must hold at least one message")
    if template is None:
        told = "the served model has no chat template; use /v1/completions or add chat_template.jinja to the model"
        raise InvalidRequest.of("messages", told)
    continues = body.boolean(CONTINUES)
    begins = body.boolean("add_generation_prompt", not continues)
    tools, variables = _offered_tools(body, template), {**read_variables(body), "add_generation_prompt": begins}
    texts = [_plain_message(index, message) for index, message in enumerate(messages)]
    check_structure(texts)
    if not continues:
        refuse_unserved(Body(texts[-1], where=f"messages[{len(texts) - 1}]."), LAST_MESSAGE_FIELDS)
        return _prompt_with(template, texts, tools, variables)
    if begins:
        told = "add_generation_prompt begins a message of its own; leave out one of the two"
        raise InvalidRequest.of(CONTINUES, told)
    return up_to_mark(_prompt_with(template, with_mark(texts), tools, variables), texts)


def _prompt_with(
    template: ChatTemplate, texts: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> str:
    """Raises InvalidRequest."""
    prompt_with = partial(_prompt, template, texts, **variables)
    try:
        return prompt_with(tools)
    except InvalidRequest:
        if tools is None and template.has_two and any(message.get("tool_calls") for message in texts):
            with suppress(InvalidRequest):  # earlier calls may be shown by the template for tools alone
                return prompt_with([])
        raise


def _prompt(
    template: ChatTemplate, texts: list[dict[str, Any]], tools: list[dict[str, Any]] | None, /, **variables: Any
) -> str:
    """Raises InvalidRequest for what the template does not show."""
    render = partial(template.render, tools=tools, **variables)
    prompt = _render(render, texts)
    is_doubtful = any(message["content"] for message in texts) and not template.is_text_shown(of_tools=tools is not None)
    if is_doubtful and not _is_seen(prompt, partial(_render, render, [message | {"content": ""} for message in texts])):
        raise InvalidRequest.of(
            "messages",
            "the chat template of the served model shows none of their text to it; render the prompt and use /v1/completions, "
            "or correct the model's template",
        )
    index = next((i for i, message in enumerate(texts) if message.get("tool_calls")), None)
    if index is None or _is_seen(prompt, partial(render, _without_calls(texts))):
        return prompt
    without_text = [_without_empty_text(message) for message in texts]  # some look for calls where there is no text
    with suppress(InvalidRequest):
        prompt = _render(render, without_text)
        if render(_without_calls(without_text)) != prompt:
            return prompt
    told = "the chat template of the served model shows none to it; write them into content"
    raise InvalidRequest.of(f"messages[{index}].tool_calls", told)


def _render(render: Callable[[list[dict[str, Any]]], str], texts: list[dict[str, Any]]) -> str:
    """Arguments of calls come as JSON text; templates that write them as JSON would quote it, others put the text itself
    between their own."""
    objects = [with_objects(message) for message in texts]
    try:
        return render(objects)
    except InvalidRequest:
        for others in _variants(objects, texts):
            with suppress(InvalidRequest):
                return render(others)
        raise


def _variants(objects: list[dict[str, Any]], texts: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """For templates that refuse `objects`, which is `texts` with arguments of calls as objects where they are such."""
    yield from (others for others in (_as_some_want(objects), texts) if others != objects)
    readable = [with_objects(message, always=True) for message in texts]
    if readable != objects:
        yield readable
        yield _as_some_want(readable)


def _as_some_want(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clients need not name the function whose result they send, which Hermes wants, and Mistral wants ids of nine characters;
    these are the last ones, as theirs are that take longer ones."""
    names, wanted = dict[str, Any](), list[dict[str, Any]]()
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            for call in calls:
                match call:
                    case {"id": str(call_id), "function": {"name": name}}:
                        names[call_id] = name
            message = {**message, "tool_calls": [_with_short_id(call) for call in calls]}
        if message["role"] == "tool" and isinstance(answered := message.get("tool_call_id"), str):
            named = {"name": names[answered]} if answered in names else {}
            message = named | message | {"tool_call_id": answered[-_ID_LENGTH:]}
        wanted.append(message)
    return wanted


def _with_short_id(call: Any) -> Any:
    return {**call, "id": call["id"][-_ID_LENGTH:]} if isinstance(call, dict) and isinstance(call.get("id"), str) else call


def _is_seen(prompt: str, render_without: Callable[[], str]) -> bool:
    """Whether the prompt would be another without what is left out there."""
    try:
        return render_without() != prompt
    except InvalidRequest:  # the template misses it
        return True


def _without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]


def _without_empty_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message of calls alone, as OpenAI writes it."""
    return {**message, "content": None} if message.get("tool_calls") and message["content"] in _NO_TEXT else message


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Content is a string or a list of parts that have nothing but text; what is null, or an empty list of calls, is left out:
    some templates look only whether it is there."""
    where = f"messages[{index}]"
    message = {name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest.of(f"{where}.role", "must be a non-empty string")
    refuse_unserved(Body(message, where=f"{where}."), MESSAGE_FIELDS)
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = list(map(with_arguments, calls))
    if message["role"] == "assistant":
        message |= _both_named(message)
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [text_part(_read_text(where, message["role"], part)) for part in content]}
    if content is None and (message.get("tool_calls") or message["role"] in ("assistant", "tool")):  # a tool may tell nothing
        return {**message, "content": []}
    if not isinstance(content, str):
        raise InvalidRequest.of(f"{where}.content", "must be a string or a list of text parts")
    return message


def _both_named(message: dict[str, Any]) -> dict[str, str]:
    """What an assistant thought, as vLLM has it: servers answer with one of two fields, and templates read one of them."""
    thought = next((told for name in THOUGHT_FIELDS if isinstance(told := message.get(name), str) and told), None)
    return {} if thought is None else {name: thought for name in THOUGHT_FIELDS if not message.get(name)}


def _read_text(where: str, role: str, part: Any) -> str:
    """Of an assistant's earlier message also what it refused with, which OpenAI has in parts of their own, and what it thought,
    which is text to vLLM, too."""
    if isinstance(part, str):  # as vLLM takes them
        return part
    if not isinstance(part, dict):
        raise InvalidRequest.of(f"{where}.content", f"its parts must be objects or strings; got {beginning(part)}")
    kind = part.get("type")
    name = kind if kind in _ASSISTANT_PARTS and role == "assistant" else "text"
    if kind not in (_TEXT_PARTS if name == "text" else (name,)) or not isinstance(part.get(name), str):
        raise InvalidRequest.of(f"{where}.content", f"only parts of type 'text' are served; got {beginning(kind)}")
    return part[name]


def _offered_tools(body: Body, template: ChatTemplate) -> list[dict[str, Any]] | None:
    """Those that the model is shown; none where it is not to call any."""
    tools = body.objects("tools")
    read_forced(body)
    if not tools or body.get("tool_choice") == "none":
        return None
    if not template.shows_tools:
        told = "the chat template of the served model shows none to it; leave them out, or write them into messages"
        raise InvalidRequest.of("tools", told)
    read_functions(body)
    return tools
