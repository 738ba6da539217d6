"""Input lines become the requests that were written, and what is none says so and keeps its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.batch.lines import BadLine, Call, parse_line, read_lines

KEYS = st.text(max_size=8).filter(
    lambda key: key not in {"seed", "stream", "stream_options", "prompt", "token_ids", "messages"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
BODIES = st.dictionaries(KEYS, VALUES, max_size=4)


def parsed(fields: Any, *, number: int = 3, seed: int = 0) -> Call | BadLine:
    return parse_line(number, json.dumps(fields).encode(), seed=seed)


@given(BODIES, st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.sampled_from([{}, {"method": "POST"}]))
def test_a_line_in_openai_s_form_is_sent_as_it_was_written(body: dict[str, Any], url: str, method: dict[str, str]) -> None:
    odd = {"seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    assert parsed({"custom_id": "a", "url": url, "body": body | odd, **method}) == Call(3, "a", url, body | {"seed": 7})


@given(BODIES)
def test_a_line_in_a_short_form_is_sent_with_all_its_parameters(body: dict[str, Any]) -> None:
    parameters = {key: value for key, value in body.items() if key not in {"custom_id", "method", "url", "body"}}
    named = {"custom_id": "a", "method": "POST", "seed": 7, **parameters}
    for given_as, sent_as, url in (
        ({"prompt": "x"}, {"prompt": "x"}, "/v1/completions"),
        ({"token_ids": [1, 2]}, {"prompt": [1, 2]}, "/v1/completions"),
        ({"messages": []}, {"messages": []}, "/v1/chat/completions"),
    ):
        assert parsed(named | given_as) == Call(3, "a", url, parameters | sent_as | {"seed": 7})


@pytest.mark.parametrize(
    ("own", "seed", "sent"),
    [
        ({}, 5, 8),
        ({"seed": None}, 5, 8),
        ({"seed": -1}, 5, 8),
        ({"seed": -2}, 5, -2),
        ({"seed": 0}, 5, 0),
        ({}, 2**32 - 3, 0),
        ({}, -4, 2**32 - 1),
    ],
)
def test_a_line_without_a_seed_has_one_of_its_own_that_any_server_takes(own: dict[str, Any], seed: int, sent: int) -> None:
    for form in ({"prompt": "x", **own}, {"url": "/v1/completions", "body": {"prompt": "x", **own}}):
        assert parsed(form, seed=seed) == Call(3, "line-3", "/v1/completions", {"prompt": "x", "seed": sent})


@pytest.mark.parametrize(
    ("fields", "custom_id", "said"),
    [
        ([1], None, "line 3: wanted a JSON object, got list"),
        ({"custom_id": 5, "prompt": "x"}, None, "line 3: custom_id must be a string, got int"),
        ({"custom_id": "", "prompt": "x"}, None, "line 3: custom_id is empty; give it a name, or leave it out"),
        ({"custom_id": "", "url": "/v1/completions", "body": {}}, None, "line 3: custom_id is empty"),
        ({"custom_id": "a", "url": "/v1/completions"}, "a", "line 3: body must be an object, got NoneType"),
        ({"custom_id": "a", "url": "/v1/completions", "body": [1]}, "a", "line 3: body must be an object, got list"),
        ({"custom_id": "a", "body": {"prompt": "x"}}, "a", "got None"),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {}, "method": None},
            "a",
            "line 3: method must be POST, got None",
        ),
        ({"custom_id": "a"}, "a", "wanted exactly one of prompt, token_ids, messages (or url and body), got none"),
        ({"custom_id": "a", "prompt": "", "messages": []}, "a", "got prompt, messages"),
        (
            {"custom_id": "a", "token_ids": "b"},
            "a",
            "line 3: token_ids: wanted a list of integers, got 'b'; a text is a prompt",
        ),
    ],
)
def test_a_line_that_is_no_request_says_why_under_its_own_name(fields: Any, custom_id: str | None, said: str) -> None:
    line = parsed(fields)
    assert isinstance(line, BadLine)
    assert (line.number, line.custom_id) == (3, custom_id)
    assert said in line.message


def test_lines_without_a_name_are_not_taken_for_one(tmp_path: Path) -> None:
    """Each says what is wrong with it, not that another one has its name."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'nonsense\n\n[1]\n{"prompt": "x"}\n{"prompt": "x"}\n')
    first, second, *calls = read_lines(path, seed=0)
    assert isinstance(first, BadLine)
    assert first.message.startswith("line 1 is not JSON")
    assert first.custom_id == "line-1"
    assert second == BadLine(3, "line-3", "line 3: wanted a JSON object, got list")
    assert calls == [Call(number, f"line-{number}", "/v1/completions", {"prompt": "x", "seed": number}) for number in (4, 5)]


LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "nonsense", "[1]", '{"custom_id": 5, "prompt": "x"}', '{"prompt": "x"}', '{"prompt": "line-2"}']),
        st.builds(
            '{{"custom_id": "{}", {}}}'.format,
            st.sampled_from(["a", "line-1", "line-2", "line-3", "\\u006cine-3", "line\\u002d4", "line-4"]),
            st.sampled_from(['"prompt": "x"', '"nonsense": 1']),
        ),
    ),
    max_size=5,
)


@given(LINES)
def test_no_two_lines_have_one_name_and_no_request_fails_for_a_line_that_names_itself_nothing(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("named") / "in.jsonl"

    def read(texts: list[str]) -> list[Call | BadLine]:
        path.write_text("\n".join(texts), encoding="utf-8")
        return list(read_lines(path, seed=0))

    lines = read(texts)
    names = [line.custom_id for line in lines if line.custom_id is not None]
    assert len(set(names)) == len(names)
    own = {number: parse_line(number, text.encode(), seed=0).custom_id for number, text in enumerate(texts, start=1)}
    for line in lines:
        others = {name for number, name in own.items() if number != line.number}
        assert line.custom_id is not None or f"line-{line.number}" in others
        assert line.custom_id in (None, own[line.number], f"line-{line.number}")
    named = [text if own[number] else "" for number, text in enumerate(texts, start=1)]
    assert [line for line in read(named) if isinstance(line, Call)] == [line for line in lines if isinstance(line, Call)]


def test_a_heading_over_requests_that_are_called_after_other_lines_costs_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('# a heading\n{"custom_id": "line-1", "prompt": "x"}\n# the end\n', encoding="utf-8")
    heading, request, end = read_lines(path, seed=0)
    assert (heading.custom_id, request.custom_id, end.custom_id) == (None, "line-1", "line-3")
    assert isinstance(request, Call)
