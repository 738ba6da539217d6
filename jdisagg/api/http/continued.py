"""`continue_final_message`: an answer goes on with the text of the last message. The prompt of such a chat ends where that
does, which a mark behind it shows, in the way of transformers' `apply_chat_template`."""

from __future__ import annotations

from typing import Any

from jdisagg.core.errors import InvalidRequest
from jdisagg.text.content_form import text_part

CONTINUES = "continue_final_message"
_MARK = "end7of7text"
_BLANK = " "  # behind the mark: gone where the template trims what it is given


def with_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, whose content is text or a list of text parts, with a mark behind the text of the last one. Raises
    InvalidRequest for one that is not an answer in text."""
    *earlier, last = messages
    if last["role"] != "assistant":
        raise InvalidRequest.of(CONTINUES, f"the last message must be an assistant's; got one of {last['role']!r}")
    if last.get("tool_calls"):
        raise InvalidRequest.of(CONTINUES, "a message with calls is complete; send their results behind it")
    content = last["content"]
    if isinstance(content, list):
        content = [*content[:-1], text_part(_last_text(last) + _MARK + _BLANK)]
    else:
        content += _MARK + _BLANK
    return [*earlier, last | {"content": content}]


def up_to_mark(prompt: str, messages: list[dict[str, Any]]) -> str:
    """The prompt of `messages`, as they were before, that was rendered `with_mark`. Raises InvalidRequest where the template
    does not show all of the last one's text, and once."""
    before, mark, behind = prompt.rpartition(_MARK)
    text = _last_text(messages[-1])
    if not mark or _MARK in before or text.strip() not in before:
        told = "the chat template of the served model does not show the last message as it is"
        raise InvalidRequest.of(CONTINUES, f"{told}; render the prompt and use /v1/completions")
    # of nothing but blanks the template has taken those before the mark: what stands there is its own
    is_trimmed = bool(text.strip()) and not behind.startswith(_BLANK)
    return before.rstrip() if is_trimmed else before


def _last_text(message: dict[str, Any]) -> str:
    """That it ends with."""
    content = message["content"]
    return (content[-1]["text"] if content else "") if isinstance(content, list) else content
