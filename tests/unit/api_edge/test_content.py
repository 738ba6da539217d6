"""All text of a chat's messages reaches the model, in whichever form it comes and the template reads it; or it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.api.http.body import Body
from jdisagg.api.http.messages import render_prompt
from jdisagg.core.errors import InvalidRequest
from jdisagg.text.chat import ChatTemplate

OF_STRINGS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
REFUSED = [{"type": "text", "text": "No."}, {"type": "refusal", "refusal": "I won't."}]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def prompt_of(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    return render_prompt(Body({"messages": list(messages)} | fields), ChatTemplate(source, {}))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([part("one"), part("two"), part("three")], "one\ntwo\nthree"),
        ([part("one\n"), part(""), part("two")], "one\n\n\ntwo"),
        ([part("one")], "one"),
        ([part("")], ""),
        ([], ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_are_lines_of_one_string(role: str, content: list[dict[str, str]], text: str) -> None:
    messages = {"role": "user", "content": "hi"}, {"role": role, "content": content}
    assert prompt_of(OF_STRINGS, *messages) == f"user:hi;{role}:{text};"


def test_a_refusal_in_a_history_is_what_the_assistant_said() -> None:
    messages = {"role": "user", "content": "hi"}, {"role": "assistant", "content": REFUSED[1:]}
    assert prompt_of(OF_STRINGS, *messages) == "user:hi;assistant:I won't.;"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": REFUSED}, "only parts of type 'text' are served; got 'refusal'"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, "got 'refusal'"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": None}]}, "got 'refusal'"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "got 'image_url'"),
        ({"role": "assistant", "content": [{"type": ["refusal"], "refusal": "no"}]}, r"got \['refusal'\]"),
    ],
)
def test_parts_without_text_are_refused(message: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content: .*{told}") as caught:
        prompt_of(OF_STRINGS, message)
    assert caught.value.field == "messages[0].content"
