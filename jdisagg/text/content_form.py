"""The form in which a chat template reads the content of messages: a string, or a list of parts.

Most templates write `message.content`. Some, mostly of models that also see images, walk through its parts, as OpenAI has them;
in a string they find none, so the text would be missing from the prompt and nobody would know. No file says which form a
template reads, so at load it is shown a short conversation in either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from jdisagg.core.errors import InvalidRequest

_MARK = "probe7text"  # no template has it by itself
_USER = {"role": "user", "content": _MARK}
_CONVERSATIONS = (  # the next one where the template refuses the one before, or shows nothing of it
    [_USER],
    [{"role": "system", "content": "Hi."}, _USER],
    [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}, _USER],
)


_LATER = [
    {"role": "system", "content": f"{_MARK}-one"},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hi."},
    {"role": "system", "content": f"{_MARK}-two"},
    {"role": "user", "content": "Hi."},
]


class ContentForm(Enum):
    """STRING also where a template reads both."""

    STRING = "a string"
    PARTS = "a list of parts"
    UNKNOWN = "the text was seen in neither form"


def find_form(render: Callable[[Sequence[dict[str, Any]]], str]) -> ContentForm:
    """`render`: messages to the prompt, as they are; may raise InvalidRequest."""
    for conversation in _CONVERSATIONS:
        for form in (ContentForm.STRING, ContentForm.PARTS):
            try:
                prompt = render([in_form(form, message) for message in conversation])
            except InvalidRequest:
                continue
            if _MARK in prompt:
                return form
    return ContentForm.UNKNOWN


def shows_all_systems(render: Callable[[Sequence[dict[str, Any]]], str], form: ContentForm) -> bool:
    """Whether a system message in the midst of a conversation is shown, and the one at its beginning still."""
    try:
        prompt = render([in_form(form, message) for message in _LATER])
    except InvalidRequest:
        return False
    return f"{_MARK}-one" in prompt and f"{_MARK}-two" in prompt


def in_form(form: ContentForm, message: dict[str, Any]) -> dict[str, Any]:
    """The message as the template reads it, a string where the form is unknown. Its content: a string or a list of text parts;
    whatever else it is stays."""
    content = message.get("content")
    if form is ContentForm.PARTS:
        return message | {"content": [text_part(content)]} if isinstance(content, str) else message
    return message | {"content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def text_part(text: str) -> dict[str, str]:
    """A part as OpenAI writes it."""
    return {"type": "text", "text": text}
