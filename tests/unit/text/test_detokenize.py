"""The pieces of a stream join to the whole text and never hold half a character."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jdisagg.text.tokenizer import Tokenizer


def _stream(tokenizer: Tokenizer, ids: list[int] | tuple[int, ...], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_id(token)
    assert token_id is not None
    return token_id


def test_any_byte_level_tokens_join_to_their_decoding(byte_level: Tokenizer) -> None:
    @given(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(_stream(byte_level, ids, skip)) == byte_level.decode(ids, skip_special_tokens=skip)

    check()


def test_no_piece_holds_half_a_character(byte_level: Tokenizer) -> None:
    @given(text=st.text(alphabet="ab é€😀🇩🇪हि ", max_size=20))
    def check(text: str) -> None:
        pieces = _stream(byte_level, byte_level.encode(text))
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)

    check()


def test_an_emoji_split_over_tokens_appears_with_its_last_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    assert _stream(byte_level, ids) == ["", "", "", "😀", ""]
    assert _stream(byte_level, ids[:2]) == ["", "", "\ufffd"]


def test_a_character_that_a_prompt_begins_is_the_answers(byte_level: Tokenizer) -> None:
    smile = byte_level.encode("a😀", add_special_tokens=False)
    likely = st.sampled_from([*smile, *byte_level.special_ids])

    @given(st.lists(st.integers(0, byte_level.vocab_size - 1) | likely, max_size=20), st.integers(0, 20), st.booleans())
    @example([*smile[:3], *byte_level.special_ids, smile[3]], 4, True)
    @example([*smile[:3], *byte_level.special_ids, smile[3]], 4, False)
    def check(ids: list[int], length: int, skip: bool) -> None:
        prompt, answer = ids[:length], ids[length:]
        stream = byte_level.detokenizer(skip_special_tokens=skip, before=prompt)
        text = byte_level.decode_begun(prompt, skip_special_tokens=skip) + "".join(map(stream.push, answer)) + stream.flush()
        assert text == byte_level.decode(ids, skip_special_tokens=skip)

    check()
    stream = byte_level.detokenizer(before=smile[:-1])
    assert (byte_level.decode_begun(smile[:-1]), stream.push(smile[-1]), stream.flush()) == ("a", "😀", "")


def test_byte_fallback_keeps_leading_spaces_and_waits_for_whole_characters(byte_fallback: Tokenizer) -> None:
    words = ["\u2581hello", "\u2581world", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\u2581hello", "llo"]
    ids = [_id(byte_fallback, word) for word in words]
    pieces = _stream(byte_fallback, ids)
    assert pieces == ["hello", " world", "", "", "", "😀", " hello", "llo", ""]
    assert "".join(pieces) == byte_fallback.decode(ids)


def test_any_byte_fallback_text_joins_to_its_decoding_wherever_its_prompt_ends(byte_fallback: Tokenizer) -> None:
    words = ["\u2581", "\u2581hello", "llo", "\ufffd", "<s>", "</s>"]
    parts = [*([_id(byte_fallback, word)] for word in words), *(_bytes_of(byte_fallback, text) for text in "é中😀")]

    @given(st.lists(st.sampled_from(parts), max_size=14), st.integers(0, 30), st.booleans())
    def check(drawn: list[list[int]], length: int, skip: bool) -> None:
        ids = [*chain(*drawn)]
        prompt, answer = ids[:length], ids[length:]
        stream = byte_fallback.detokenizer(skip_special_tokens=skip, before=prompt)
        begun = byte_fallback.decode_begun(prompt, skip_special_tokens=skip)
        assert begun + "".join(map(stream.push, answer)) + stream.flush() == byte_fallback.decode(ids, skip_special_tokens=skip)

    check()


@given(text=st.text(alphabet="ab é€😀_ ", max_size=20))
def test_no_piece_holds_half_a_character_whatever_else_a_decoder_does(byte_level_directory: Path, text: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level_directory / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("_", " ")])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = Tokenizer(backend)
    pieces = _stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text.replace("_", " ")
    assert all("\ufffd" not in piece for piece in pieces)


def test_endless_marks_are_not_withheld_for_ever(byte_fallback: Tokenizer) -> None:
    """A vocabulary has the mark of what is no character, too."""
    detokenizer = byte_fallback.detokenizer()
    assert "".join(detokenizer.push(_id(byte_fallback, "\ufffd")) for _ in range(64)).count("\ufffd") >= 56


def test_endless_invalid_bytes_are_not_withheld_for_ever(byte_fallback: Tokenizer) -> None:
    bad = _id(byte_fallback, "<0x80>")
    detokenizer = byte_fallback.detokenizer()
    assert "".join(detokenizer.push(bad) for _ in range(64)).count("\ufffd") >= 56


@pytest.mark.parametrize(("token", "expected"), [("<0xE2>", b"\xe2"), ("\u2581hello", b" hello"), ("<s>", b"<s>")])
def test_token_bytes_of_byte_fallback(byte_fallback: Tokenizer, token: str, expected: bytes) -> None:
    assert byte_fallback.token_bytes(_id(byte_fallback, token)) == expected
    assert byte_fallback.token_text(_id(byte_fallback, token)) == expected.decode(errors="replace")
    assert byte_fallback.token_bytes(10_000) == b""


def test_what_looks_like_a_byte_is_text_where_the_decoder_reads_it_so() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<0x41>": 0}, unk_token="<0x41>"))
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = Tokenizer(backend)
    assert "".join(_stream(tokenizer, [0, 0])) == tokenizer.decode([0, 0]) == "<0x41><0x41>"
    assert tokenizer.token_bytes(0) == b"<0x41>"


def test_token_bytes_of_byte_level_join_to_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the fox 😀", add_special_tokens=False)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == "the fox 😀".encode()
    assert byte_level.token_bytes(10_000) == b""


def test_every_byte_is_that_of_a_byte_level_token(byte_level: Tokenizer) -> None:
    text = "".join(map(chr, [*range(0x800), 0x800, 0x1000, *range(0x2000, 0xD000, 0x1000), 0xD000, 0xE000, 0xF000]))
    text += "".join(map(chr, range(0x10000, 0x110000, 0x40000)))
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text, add_special_tokens=False))) == text.encode()
    spelled = [byte_level.token_bytes(_id(byte_level, token)) for token in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(spelled) == [bytes([byte]) for byte in range(256)]


@given(token=st.text(st.characters(max_codepoint=0x180), min_size=1, max_size=4))
@example("\u0144")  # the first one that stands for no byte
def test_a_token_of_any_characters_is_spelled_as_it_is_decoded(token: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({token: 0}, unk_token=token))
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    assert Tokenizer(backend).token_text(0) == backend.decode([0])


def _bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [_id(tokenizer, f"<0x{byte:02X}>") for byte in text.encode()]


@pytest.mark.parametrize("text", ["😀😀😀😀😀", "中文字符测试", "é€😀é€😀"])
def test_byte_fallback_shows_every_character_of_a_run_longer_than_its_window(byte_fallback: Tokenizer, text: str) -> None:
    ids = [_id(byte_fallback, "\u2581hello"), *_bytes_of(byte_fallback, text), _id(byte_fallback, "\u2581world")]
    pieces = _stream(byte_fallback, ids)
    assert "".join(pieces) == f"hello{text} world" == byte_fallback.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def test_byte_fallback_makes_one_mark_of_one_unfinished_character(byte_fallback: Tokenizer) -> None:
    whole, cut = _bytes_of(byte_fallback, "中"), _bytes_of(byte_fallback, "文")[:2]
    assert "".join(_stream(byte_fallback, [*whole, *cut])) == "中\ufffd"
    assert "".join(_stream(byte_fallback, [*whole, *cut, _id(byte_fallback, "\u2581hello")])) == "中\ufffd hello"


@pytest.mark.parametrize("num_begun", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "hello", "中"])
@pytest.mark.parametrize("skipped", [True, False])
def test_byte_fallback_ends_the_character_that_a_prompt_begins(
    byte_fallback: Tokenizer, before: str, num_begun: int, skipped: bool
) -> None:
    whole = [_id(byte_fallback, "\u2581hello")] if before == "hello" else _bytes_of(byte_fallback, before)
    smile = _bytes_of(byte_fallback, "😀")
    prompt = [*whole, *smile[:num_begun], *([_id(byte_fallback, "<s>")] if skipped else [])]
    stream = byte_fallback.detokenizer(before=prompt)
    answer = "".join(map(stream.push, [*smile[num_begun:], _id(byte_fallback, "\u2581world")])) + stream.flush()
    assert (byte_fallback.decode_begun(prompt), answer) == (before, "😀 world")


def test_byte_fallback_marks_the_character_that_neither_prompt_nor_answer_ends(byte_fallback: Tokenizer) -> None:
    prompt = [_id(byte_fallback, "\u2581hello"), *_bytes_of(byte_fallback, "😀")[:2]]
    stream = byte_fallback.detokenizer(before=prompt)
    pieces = (byte_fallback.decode_begun(prompt), stream.push(_id(byte_fallback, "\u2581world")), stream.flush())
    assert pieces == ("hello", "\ufffd world", "")


@pytest.mark.parametrize("rest", [[], [decoders.Fuse()]])
def test_a_byte_level_decoder_may_stand_in_a_sequence(byte_level_directory: Path, rest: list[decoders.Decoder]) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level_directory / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), *rest])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("the fox 😀", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "the fox 😀".encode()
    stream = tokenizer.detokenizer(before=ids[:-1])
    assert (tokenizer.decode_begun(ids[:-1]), stream.push(ids[-1]), stream.flush()) == ("the fox ", "😀", "")


def test_an_answer_begins_with_the_space_that_parts_it_from_its_prompt(byte_fallback: Tokenizer) -> None:
    prompt, answer = [_id(byte_fallback, "\u2581hello")], [_id(byte_fallback, "\u2581world")]
    detokenizer = byte_fallback.detokenizer(before=prompt)
    assert byte_fallback.decode(prompt) + detokenizer.push(answer[0]) == byte_fallback.decode(prompt + answer)
    assert byte_fallback.detokenizer(before=[_id(byte_fallback, "<s>")]).push(answer[0]) == "world"  # nothing was said yet


def test_however_many_special_tokens_end_a_prompt_its_answer_goes_on_with_its_text(byte_fallback: Tokenizer) -> None:
    text, marks = byte_fallback.encode("hello", add_special_tokens=False), [_id(byte_fallback, "<s>")] * 8
    answer = _id(byte_fallback, "\u2581world")
    assert byte_fallback.detokenizer(before=[*text, *marks]).push(answer) == " world"
    *begun, last = _bytes_of(byte_fallback, "😀")
    assert byte_fallback.detokenizer(before=[*begun, *marks]).push(last) == "😀"
