"""Encoding, special tokens and chat templates equal transformers'."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from jdisagg.core.errors import ConfigError, InvalidRequest
from jdisagg.models.resolve import eos_token_ids
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.tokenizer import Tokenizer

TEXTS = ["the quick fox", "", " leading", "😀 é€x", "</s> in text", "line\n\nline"]
MESSAGES = [
    {"role": "system", "content": ' Be <brief> & "exact". '},
    {"role": "user", "content": "Grüß 😀?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "über", "parameters": {"type": "object", "properties": {"a": {"type": "<b>"}}}},
}


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_ids_and_text_equal_transformers(byte_level_directory: Path, tmp_path: Path, flags: dict[str, bool]) -> None:
    shutil.copy(byte_level_directory / "tokenizer.json", tmp_path)
    config = json.loads((byte_level_directory / "tokenizer_config.json").read_text()) | flags
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert list(ours.encode(text, add_special_tokens=special)) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.special_ids == set(theirs.all_special_ids)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", [MESSAGES, [*MESSAGES, {"role": "break", "content": ""}, MESSAGES[1]]])
def test_chat_prompt_equals_transformers(
    byte_level_directory: Path, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None, generate: bool
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level_directory)
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
    chat = Tokenizer.from_directory(byte_level_directory).chat
    assert chat is not None
    rendered = chat.render(messages, tools=tools, add_generation_prompt=generate)
    assert rendered == expected
    assert "<s>" in rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson(separators=(',', ':')) }}",
        "{{ tools | tojson(sort_keys=true) }}",
        "{{ tools | tojson(ensure_ascii=true) }}",
        "{{ strftime_now('%Y') }}",
        "{{ documents }} {{ documents is none }} {{ tools is none }}",
    ],
)
def test_what_a_template_may_call_does_as_in_transformers(byte_level_directory: Path, source: str) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level_directory)
    for given in ({"tools": [TOOL]}, {}):
        expected = theirs.apply_chat_template(MESSAGES, chat_template=source, tokenize=False, **given)
        assert ChatTemplate(source, {}).render(MESSAGES, **given) == expected


def test_a_template_file_wins_and_refusals_name_the_messages(byte_level_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_level_directory, tmp_path, dirs_exist_ok=True)
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ raise_exception('no ' + messages[0].role) }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    chat = Tokenizer.from_directory(tmp_path).chat
    assert chat is not None
    with pytest.raises(InvalidRequest, match="no user") as caught:
        chat.render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "way",
    [
        "{{ 1 / q }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content | truncate(2 + q) }}",
        "{{ cycler(*[q][:0]) }}",
        "{{ 'x' * (10 ** 15 + q) }}",
    ],
)
def test_whatever_a_template_stumbles_over_is_a_refusal(way: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate(way, {}).render(MESSAGES, q=0)


NAMED = {"rag": "{{ documents }}", "default": "plain {{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}


def _write_named(directory: Path, form: str) -> None:
    """The templates of NAMED as lists of tokenizer_config.json have them, as an object, or as files."""
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "not this one"
    if form == "list":
        config["chat_template"] = [{"name": name, "template": template} for name, template in NAMED.items()]
    elif form == "object":
        config["chat_template"] = NAMED
    else:
        (directory / "chat_template.jinja").write_text(NAMED["default"])
        (directory / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (directory / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["list", "object", "files"])
def test_of_named_templates_tools_have_their_own_as_in_transformers(
    byte_level_directory: Path, tmp_path: Path, form: str
) -> None:
    shutil.copytree(byte_level_directory, tmp_path, dirs_exist_ok=True)
    _write_named(tmp_path, form)
    chat, theirs = Tokenizer.from_directory(tmp_path).chat, PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert chat is not None
    assert chat.shows_tools
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert chat.render(MESSAGES, tools=tools, add_generation_prompt=False) == expected
    assert expected == "1 tools"


def test_the_only_template_counts_whatever_its_name(byte_level_directory: Path, tmp_path: Path) -> None:
    shutil.copy(byte_level_directory / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"chat": "{{ messages[0].content }}"}}))
    chat = Tokenizer.from_directory(tmp_path).chat
    assert chat is not None
    assert chat.render([{"content": "hi"}]) == "hi"


def test_templates_are_sandboxed_and_checked_at_load(byte_level_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_level_directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ ''.__class__.__mro__ }}")
    chat = Tokenizer.from_directory(tmp_path).chat
    assert chat is not None
    with pytest.raises(InvalidRequest, match="unsafe"):
        chat.render([])
    path.write_text("{% if %}")
    with pytest.raises(ConfigError, match="line 1"):
        Tokenizer.from_directory(tmp_path)


def test_a_directory_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json .* save it there"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", b"{}", ""),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1", ""),
        ("tokenizer.json", b"\xff\xfe", "UTF-8"),
        ("tokenizer_config.json", b"{", "Expecting property name"),
        ("tokenizer_config.json", b"[]", "it holds list, wanted a JSON object"),
        ("chat_template.jinja", b"\xff", "can't decode byte 0xff"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    byte_level_directory: Path, tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    directory = shutil.copytree(byte_level_directory, tmp_path / "model")
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: not readable: .*{why}"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": ["{{ messages }}"]},
        {"chat_template": [{"template": "{{ messages }}"}]},
        {"chat_template": {"default": None}},
        {"eos_token": ["</s>"]},
        {"eos_token": {"content": 2}},
    ],
)
def test_what_tokenizer_config_says_with_a_value_of_the_wrong_kind_is_a_bad_configuration(
    byte_level_directory: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    directory = shutil.copytree(byte_level_directory, tmp_path / "model")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text("{}")
    eos_token_ids(directory)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: "):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    "content",
    [
        {"added_tokens": [{"id": 3}]},
        {"added_tokens": 5},
        {"added_tokens": ["<s>"]},
        {"model": [1]},
        {"model": {"vocab": 5}},
        {"model": {"vocab": [["a", 0.0, 1]]}},
    ],
)
def test_a_file_that_is_json_and_no_tokenizer_is_a_bad_configuration(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a tokenizer's file: "):
        eos_token_ids(tmp_path)


def test_the_packaged_model_tokenizes_and_chats_as_in_transformers() -> None:
    directory = Path(str(resources.files("jdisagg"))) / "demo"
    ours, theirs = Tokenizer.from_directory(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert list(ours.encode(text)) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.chat is not None
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.chat.render(MESSAGES) == expected


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenized(byte_level_directory: Path, work: str) -> None:
    tokenizer = Tokenizer.from_directory(byte_level_directory)
    text = "the quick fox jumps\n" * 60_000
    ids = tokenizer.encode(text) * 4
    functions: dict[str, Callable[[], object]] = {
        "encode": lambda: tokenizer.encode(text),
        "decode": lambda: tokenizer.decode(ids),
    }

    def share() -> float:
        """Of the time that it takes, the longest in which this thread did not run."""
        done = threading.Event()

        def run() -> None:
            functions[work]()
            done.set()

        thread = threading.Thread(target=run)
        began_s = last_s = time.monotonic()
        thread.start()
        longest_s = 0.0
        while not done.wait(0.001):
            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        longest_s = max(longest_s, time.monotonic() - last_s)
        thread.join()
        return longest_s / (time.monotonic() - began_s)

    assert any(share() < 0.5 for _ in range(5)), "a machine that does other things does not keep it from running each time"


def test_a_digest_tells_vocabularies_special_tokens_and_templates_apart(byte_level_directory: Path, tmp_path: Path) -> None:
    def digest(name: str, file: str = "", text: str = "") -> str:
        directory = tmp_path / name
        shutil.copytree(byte_level_directory, directory)
        if file:
            (directory / file).write_text(text)
        return Tokenizer.from_directory(directory).digest()

    template = "{{ messages[0].content }}"
    raw = json.loads((byte_level_directory / "tokenizer.json").read_text())
    written = json.loads((byte_level_directory / "tokenizer_config.json").read_text())
    vocabulary = raw["model"]["vocab"]
    (one, first), (two, second) = list(vocabulary.items())[-2:]
    vocabulary |= {one: second, two: first}
    changed = {
        digest("vocabulary", "tokenizer.json", json.dumps(raw)),
        digest("template", "chat_template.jinja", template),
        digest("special", "tokenizer_config.json", json.dumps({"pad_token": "<another>"})),
        digest("added", "added_tokens.json", json.dumps({"<more>": 1000})),
        digest("split", "tokenizer_config.json", json.dumps(written | {"split_special_tokens": True})),
    }
    assert digest("one") == digest("two")
    inside = digest("template inside", "tokenizer_config.json", json.dumps(written | {"chat_template": template}))
    assert inside in changed, "wherever it is written"
    assert digest("one again") not in changed
    assert len(changed) == 5


def test_a_tokenizer_that_git_left_out_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not readable: .* git lfs pull"):
        Tokenizer.from_directory(tmp_path)
