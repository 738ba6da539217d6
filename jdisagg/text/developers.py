"""Messages of the role `developer`, OpenAI's newer name for `system`, for a chat template that has not heard of it.

Most templates know one system message, the first; others refuse a second one, leave it out, or let it stand for the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

_DEVELOPER, _SYSTEM = "developer", "system"
_BETWEEN = "\n\n"  # as in vLLM


def has_developer(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether one of them is a developer's."""
    return any(message.get("role") == _DEVELOPER for message in messages)


def as_systems(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With all that the conversation begins with as one system message. A later one of a developer is a system message in its
    place: at the beginning it would change what every turn before it has in caches."""
    first = list(takewhile(_instructs, messages))
    rest = messages[len(first) :]
    return [*_in_one(first), *(message | {"role": _SYSTEM} if _instructs(message) else message for message in rest)]


def as_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With all of them as one system message at the beginning, as vLLM has it."""
    return [*_in_one(list(filter(_instructs, messages))), *(message for message in messages if not _instructs(message))]


def _instructs(message: dict[str, Any]) -> bool:
    return message.get("role") in (_DEVELOPER, _SYSTEM)


def _in_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """None of none. Their contents are strings, or lists of parts, all alike."""
    if not messages:
        return []
    contents = [content for message in messages if (content := message.get("content"))]
    if contents and isinstance(contents[0], list):
        content = [part for parts in contents for part in parts]
    else:
        content = _BETWEEN.join(contents)
    return [{**messages[0], "role": _SYSTEM, "content": content}]
