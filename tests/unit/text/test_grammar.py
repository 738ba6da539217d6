"""What may come next in a grammar, over real tokenizers."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from jdisagg.core.requests import Grammar
from jdisagg.text.grammar import Grammars
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.grammar_rig import (
    advanced,
    allowed,
    demo_grammars,
    demo_tokenizer,
    demo_vocabulary,
    lark,
    regex,
    schema,
    text_of,
    vocabulary,
    walk,
)

EOS = (1, 5)  # the demo's two
PERSON = schema(
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},'
    ' "required": ["name", "age"], "additionalProperties": false}'
)
SOME = [regex("(ab|ac)+[0-9]{1,3}"), regex("[äöü€😀]{3,9}"), PERSON, lark('start: "x" start "y" | "z"\n'), schema("{}")]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def encode(text: str) -> tuple[int, ...]:
    return demo_tokenizer().encode(text, add_special_tokens=False)


def beginnings(tokenizer: Tokenizer, texts: list[str]) -> set[int]:
    """Tokens whose text begins one of `texts`, which are ASCII."""
    found = [(token_id, tokenizer.decode([token_id])) for token_id in range(tokenizer.vocab_size)]
    return {token_id for token_id, text in found if text and any(whole.startswith(text) for whole in texts)}


@pytest.mark.parametrize("texts", [["ab", "ac"], ["true", "false", "null"], ["the end", "the", "then"], ["0"]])
def test_those_tokens_are_allowed_that_begin_a_text_of_the_grammar_and_no_others(grammars: Grammars, texts: list[str]) -> None:
    grammar = regex("|".join(map(re.escape, texts)))
    wanted = beginnings(demo_tokenizer(), texts)
    assert wanted, "the tokenizer has single characters at least"
    assert allowed(grammars.matcher(grammar)) == wanted
    for token_id in wanted:
        so_far = demo_tokenizer().decode([token_id])
        rest = [text.removeprefix(so_far) for text in texts if text.startswith(so_far)]
        ends = set(EOS) if "" in rest else set[int]()
        bits, wanted_next = allowed(advanced(grammars, grammar, [token_id])), beginnings(demo_tokenizer(), rest) | ends
        if len({text[:1] for text in rest}) == 1:  # of ways to spell what has to come, the library leaves the tokenizer's own
            assert set() < bits <= wanted_next
        else:
            assert bits == wanted_next


@pytest.mark.parametrize("grammar", SOME)
def test_an_answer_that_takes_what_is_allowed_is_of_the_grammar_and_ends_with_an_eos_alone(
    grammars: Grammars, grammar: Grammar
) -> None:
    ended = 0
    for seed in range(12):
        matcher = grammars.matcher(grammar)
        token_ids = walk(matcher, EOS, seed)
        assert not set(token_ids[:-1]) & set(EOS)
        if token_ids[-1] not in EOS:
            continue
        ended += 1
        text = text_of(demo_tokenizer(), token_ids, EOS)
        if grammar in SOME[:2]:
            assert re.fullmatch(grammar.text, text)
        elif grammar == SOME[3]:
            assert re.fullmatch("x*zy*", text)
            assert text.count("x") == text.count("y")
        else:
            json.loads(text)
        assert allowed(matcher) == set(EOS), "nothing goes on behind the end"
        matcher.advance([EOS[0], EOS[1]])
        assert matcher.error == "", "a step may sample one more before the end is seen"
    assert ended > 2


def test_a_whole_answer_is_reachable_token_by_token_and_may_end_there_and_not_before(grammars: Grammars) -> None:
    answer = '{"name": "Zoë", "age": 42}'
    token_ids, matcher = encode(answer), grammars.matcher(PERSON)
    for token_id in token_ids:
        bits = allowed(matcher)
        assert token_id in bits
        assert not bits & set(EOS)
        matcher.advance([token_id])
    assert allowed(matcher) == set(EOS)
    assert matcher.error == ""


@pytest.mark.parametrize("eos", [(1,), (5,), (1, 5), (5, 1, 7)])
def test_each_eos_of_the_model_ends_an_answer_and_no_other_special_token(eos: tuple[int, ...]) -> None:
    grammars = Grammars(vocabulary(demo_tokenizer(), eos))
    for last in eos:
        matcher = advanced(grammars, regex("a"), encode("a"))
        assert allowed(matcher) == set(eos)
        matcher.advance([last])
        assert matcher.error == ""


@pytest.mark.parametrize("grammar", SOME)
def test_one_that_is_told_what_was_generated_stands_where_the_one_that_generated_it_stood(
    grammars: Grammars, grammar: Grammar
) -> None:
    for seed in range(8):
        token_ids = walk(grammars.matcher(grammar), EOS, seed, most=25)
        step_by_step, fresh = grammars.matcher(grammar), demo_grammars() if seed == 0 else grammars
        for num_known in range(len(token_ids) + 1):
            told = advanced(fresh, grammar, token_ids[:num_known])
            assert told.allowed() == step_by_step.allowed()
            assert (told.error, step_by_step.error) == ("", "")
            step_by_step.advance(token_ids[num_known : num_known + 1])


def test_matchers_of_one_grammar_do_not_move_each_other(grammars: Grammars) -> None:
    grammar = regex("[ab]c[de]f")
    one, first = grammars.matcher(grammar), grammars.matcher(grammar).allowed()
    one.advance(encode("ac"))
    other = grammars.matcher(grammar)
    assert other.allowed() == first
    other.advance(encode("zz"))
    assert other.error
    assert one.error == ""
    assert allowed(one) == beginnings(demo_tokenizer(), ["df", "ef"])
    assert grammars.matcher(grammar).allowed() == first


def test_threads_walk_copies_of_one_grammar_as_one_thread_does(grammars: Grammars) -> None:
    grammar = regex(r"(.*a.*b.{0,9}){2,4}")

    def walked(seed: int) -> list[int]:
        return walk(grammars.matcher(grammar), EOS, seed, most=40)

    alone = [walk(demo_grammars().matcher(grammar), EOS, seed, most=40) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(walked, range(8))) == alone


def test_bits_past_the_tokenizer_are_unset_up_to_the_vocabulary_of_the_model() -> None:
    size = demo_tokenizer().vocab_size + 1000
    matcher = Grammars(vocabulary(demo_tokenizer(), EOS, size)).matcher(regex(r"(?s:.*)"))
    assert 8 * len(matcher.allowed()) >= size
    bits = allowed(matcher)
    assert max(bits) < demo_tokenizer().vocab_size
    assert bits > set(EOS)
    matcher.advance([size - 1])
    assert matcher.error


@pytest.mark.parametrize(
    "grammar", [regex(r"(?s:.*)"), schema("{}"), lark("start: /(?s:.*)/")], ids=lambda grammar: grammar.text
)
def test_special_tokens_are_no_text(grammars: Grammars, grammar: Grammar) -> None:
    special = {token_id for token_id, is_special in enumerate(_is_special()) if is_special}
    assert special > set(EOS)
    matcher = grammars.matcher(grammar)
    for token_id in encode('"a'):
        assert not allowed(matcher) & (special - set(EOS))
        matcher.advance([token_id])
    assert not allowed(matcher) & (special - set(EOS))
    matcher.advance([4])
    assert matcher.error


@pytest.mark.parametrize("name", ["<|assistant|>", "<|end|>", "</s>"])
def test_a_text_that_reads_like_a_special_token_is_written_by_other_tokens(grammars: Grammars, name: str) -> None:
    for grammar, wanted in (
        (regex(re.escape(name)), name),
        (schema(json.dumps({"const": f"a{name}"})), json.dumps(f"a{name}")),
    ):
        matcher, special = grammars.matcher(grammar), _is_special()
        token_ids = walk(matcher, EOS, seed=0)
        assert [token_id for token_id in token_ids if special[token_id]] == token_ids[-1:]
        assert text_of(demo_tokenizer(), token_ids, EOS) == wanted


def _is_special() -> list[bool]:
    added = {token["id"] for token in json.loads(demo_vocabulary().tokenizer_json)["added_tokens"] if token["special"]}
    return [token_id in added for token_id in range(demo_tokenizer().vocab_size)]


def test_a_character_may_be_split_between_tokens_of_bytes_and_of_byte_fallback(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    for tokenizer, eos in ((byte_level, 1), (byte_fallback, 1)):
        grammars = Grammars(vocabulary(tokenizer, (eos,)))
        texts = "äö€😀"
        for text in texts:
            matcher, num_tokens = grammars.matcher(regex(f"[{texts}]")), 0
            for byte in text.encode():
                by_byte = _byte_token(tokenizer, byte)
                assert by_byte in allowed(matcher)
                assert eos not in allowed(matcher), "half a character is no answer"
                matcher.advance([by_byte])
                num_tokens += 1
            assert num_tokens > 1
            assert allowed(matcher) == {eos}
            assert matcher.error == ""
        wrong = advanced(grammars, regex(f"[{texts}]"), [_byte_token(tokenizer, "ä".encode()[0])])
        assert _byte_token(tokenizer, ord("x")) not in allowed(wrong)


def _byte_token(tokenizer: Tokenizer, byte: int) -> int:
    words: dict[str, int] = json.loads(tokenizer.to_json())["model"]["vocab"]
    if f"<0x{byte:02X}>" in words:
        return words[f"<0x{byte:02X}>"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's characters for bytes
    others = [other for other in range(256) if other not in printable]
    return words[chr(byte) if byte in printable else chr(256 + others.index(byte))]


def test_a_word_that_begins_with_a_blank_is_one_in_a_tokenizer_of_byte_fallback(byte_fallback: Tokenizer) -> None:
    words: dict[str, int] = json.loads(byte_fallback.to_json())["model"]["vocab"]
    grammars = Grammars(vocabulary(byte_fallback, (words["</s>"],)))
    bits = allowed(grammars.matcher(regex(" hello| world")))
    assert {words["▁hello"], words["▁world"], words["▁"]} <= bits
    assert words["he"] not in bits
    after = advanced(grammars, regex(" hello| world"), [words["▁hello"]])
    assert allowed(after) == {words["</s>"]}
