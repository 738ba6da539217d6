"""`bad_words`: a text without them is free, and none of them is ever completed, however it is cut into tokens."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.bad_words import MAX_BAD_LENGTH, MAX_BAD_WORDS, without
from jdisagg.text.grammar import Grammars
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.grammar_rig import allowed, demo_grammars, demo_tokenizer, text_of, vocabulary, walk

EOS = (1, 5)  # the demo's two
HIDDEN = {0, 1, 2, 3, 4, 5}
SYSTEM = 2  # <|system|>
WORDS = st.lists(st.text("abehnt é/\n😀", min_size=1, max_size=3), min_size=1, max_size=4)
ORDINARY = """
abandon accident adversary ambition arrogant assassin bastards bankrupt betrayal bigotry blackmail bloodshed brutality
burglary cannibal casualty catastrophe chemical cigarette cocaine coercion conspiracy corruption criminal cruelty
cyanide dangerous deception decapitate demolish depraved despicable destroyer detonate disaster disgusting dynamite
explosive extortion fascist felony fraudster gambling genocide grenade gruesome guillotine hatred heroin hijacker
homicide hostage humiliate idiotic imbecile infidel insanity invasion jailbird kidnapper larceny lunatic malicious
massacre maniac mercenary militant molester moronic mugging murderer mutilate narcotic nefarious nightmare obscene
offensive opioid overdose pervert pillage poisonous prejudice prisoner profanity radical ransom rebellion reckless
repulsive revenge robbery sabotage savage sinister slander slaughter smuggler stalker strangle suicide terrorist torture
traitor treason vandal venomous villain violence vulgar warfare weapon wicked
""".split()[:MAX_BAD_WORDS]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


@lru_cache(maxsize=1)
def large_tokenizer() -> Tokenizer:
    """Of 50,000 tokens, syllables that make words of up to 12 letters, with and without a space before."""
    chosen, texts = random.Random(1), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(texts) < 50_000:
        word = "".join(chosen.choice("bcdfglmnprst") + chosen.choice("aeiou") for _ in range(chosen.randint(1, 6)))
        texts |= dict.fromkeys((word, f"Ġ{word}"))
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(texts)}, merges=[]))
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


@lru_cache(maxsize=1)
def large_words() -> list[str]:
    tokenizer = large_tokenizer()
    texts = (tokenizer.token_text(token_id) for token_id in range(300, tokenizer.vocab_size - 1))
    return sorted({text.strip() for text in texts if len(text.strip()) >= 6})


def large_grammars() -> Grammars:
    tokenizer = large_tokenizer()
    return Grammars(vocabulary(tokenizer, (tokenizer.vocab_size - 1,)))


def begun(words: list[str]) -> str:
    """A text of all of them but for their last letters, where those are no words."""
    parts = (word[:-1] for word in words)
    return "\n".join(part for part in parts if not any(word in part for word in words))


def write(grammars: Grammars, tokenizer: Tokenizer, words: list[str], text: str) -> int:
    """The number of tokens of an answer of this text, each of them allowed."""
    matcher = grammars.matcher(without(words))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for token_id in token_ids:
        assert matcher.allowed()[token_id // 8] >> token_id % 8 & 1, tokenizer.decode([token_id])
        matcher.advance([token_id])
        assert matcher.error == ""
    return len(token_ids)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.integers(0, 99))
def test_no_answer_holds_one(grammars: Grammars, words: list[str], seed: int) -> None:
    token_ids = walk(grammars.matcher(without(words)), EOS, seed)
    text = text_of(demo_tokenizer(), token_ids, EOS)
    assert not [word for word in words if word in text]


@settings(max_examples=60, deadline=None)
@given(WORDS, st.text("abehnt é/\n😀xyz", max_size=40))
def test_a_text_without_them_may_be_written_and_end_anywhere(grammars: Grammars, words: list[str], text: str) -> None:
    assume(not [word for word in words if word in text])
    matcher = grammars.matcher(without(words))
    for token_id in demo_tokenizer().encode(text, add_special_tokens=False):
        assert token_id in allowed(matcher)
        matcher.advance([token_id])
        so_far = matcher.error
        assert so_far == ""
    assert allowed(matcher) >= HIDDEN


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("st é", min_size=2, max_size=5), min_size=1, max_size=6), st.text("st é", max_size=12))
@example(["abac", "bade", "at"], "aba")  # a place, and two shorter ones that it ends with
@example(["aab"], "aaaa")  # one letter more, and the place is the same
@example(["dear rs", "dear t", "dear ue"], "dear ")  # the first and the last of those that begin so
@example(["self.assert", "if self.asse"], "if self.")
def test_what_is_allowed_is_each_token_that_completes_none(grammars: Grammars, words: list[str], text: str) -> None:
    assume(not [word for word in words if word in text])
    tokenizer, encoded = demo_tokenizer(), [word.encode() for word in words]
    matcher = grammars.matcher(without(words))
    matcher.advance(tokenizer.encode(text, add_special_tokens=False))
    behind = {token_id: text.encode() + tokenizer.token_bytes(token_id) for token_id in {*range(tokenizer.vocab_size)} - HIDDEN}
    free = {token_id for token_id, whole in behind.items() if not [word for word in encoded if word in whole]}
    assert allowed(matcher) == free | HIDDEN


def test_a_word_ends_what_would_be_a_longer_one(grammars: Grammars) -> None:
    matcher = grammars.matcher(without(["xab", "ab!", "a"]))
    assert not allowed(matcher) & {token_id for token_id in range(6, 4096) if "a" in demo_tokenizer().token_text(token_id)}
    matcher.advance([token_id for text in "xa" for token_id in demo_tokenizer().encode(text, add_special_tokens=False)])
    assert matcher.error.endswith("has one of the bad words")


@pytest.mark.parametrize("cut", [["import"], ["im", "port"], ["i", "m", "p", "o", "r", "t"]])
def test_a_word_is_not_completed_whichever_tokens_it_is_made_of(grammars: Grammars, cut: list[str]) -> None:
    matcher = grammars.matcher(without(["import"]))
    *before, last = [token_id for part in cut for token_id in demo_tokenizer().encode(part, add_special_tokens=False)]
    matcher.advance(before)
    assert matcher.error == ""
    assert last not in allowed(matcher)
    matcher.advance([last])
    assert matcher.error == f"behind token {last} the text has one of the bad words"


def test_a_token_that_is_not_shown_may_come_in_a_word_and_does_not_part_it(grammars: Grammars) -> None:
    matcher = grammars.matcher(without(["import", "system"]))
    before, last = demo_tokenizer().encode("im", add_special_tokens=False), demo_tokenizer().token_id("port")
    matcher.advance((*before, SYSTEM, *before))
    assert allowed(matcher) >= HIDDEN
    matcher.advance([SYSTEM])
    assert last not in allowed(matcher)
    assert matcher.error == ""


def test_an_added_token_that_is_shown_is_text() -> None:
    backend = tokenizers.Tokenizer.from_str(demo_tokenizer().to_json())
    names = ["<think>", "</think>", "<tool_call>", "[TOOL]", "<|fim|>"]
    backend.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in names])
    tokenizer = Tokenizer(backend)
    grammars = Grammars(vocabulary(tokenizer, EOS, tokenizer.vocab_size + 1))

    def shown(words: list[str], text: str = "") -> set[str]:
        matcher = grammars.matcher(without(words))
        matcher.advance(tokenizer.encode(text, add_special_tokens=False))
        ids = allowed(matcher)
        assert tokenizer.vocab_size not in ids, "the model has it, the tokenizer does not"
        return {name for name in names if tokenizer.token_id(name) in ids}

    assert shown(["import"]) == set(names)
    assert shown(["think>"]) == {"<tool_call>", "[TOOL]", "<|fim|>"}
    assert shown(["a<think>", "[T", "fim|>b"], "a") == {"</think>", "<tool_call>", "<|fim|>"}
    assert write(grammars, tokenizer, ["import"], "<think> so imp</think> yes")


def test_what_is_no_list_of_words_is_refused(grammars: Grammars) -> None:
    long = ["a" * (MAX_BAD_LENGTH + 1)]
    for text in ("", "{}", "[5]", '[""]', "[]", without(long).text, without(["a"] * (MAX_BAD_WORDS + 1)).text, "[" * 60_000):
        with pytest.raises(InvalidRequest, match=r"^grammar \(bad_words\): "):
            grammars.matcher(Grammar(GrammarKind.BAD_WORDS, text))
    with pytest.raises(InvalidRequest, match="d800"):
        grammars.matcher(without(["\ud800"]))


def test_a_hundred_words_are_kept_out_of_an_answer_that_begins_each_of_them() -> None:
    assert len(set(ORDINARY)) == MAX_BAD_WORDS
    assert write(demo_grammars(), demo_tokenizer(), ORDINARY, begun(ORDINARY)) > MAX_BAD_WORDS


@pytest.mark.parametrize("head", ["", "dear "])
def test_a_hundred_words_of_a_large_vocabulary_may_be_begun_each(head: str) -> None:
    words = [head + word for word in large_words()[:: len(large_words()) // MAX_BAD_WORDS]][:MAX_BAD_WORDS]
    assert len(words) == MAX_BAD_WORDS
    assert write(large_grammars(), large_tokenizer(), words, begun(words)) > MAX_BAD_WORDS


@pytest.mark.parametrize(
    "words",
    [
        ["-" * MAX_BAD_LENGTH],
        ["a" * (27 + number) + "b" for number in range(MAX_BAD_WORDS)],
        ["a" * (MAX_BAD_LENGTH - 1) + chr(0x4E00 + number) for number in range(MAX_BAD_WORDS)],
        [
            "".join(chr(0x1F600 + (at * at + number) % 61) for at in range(MAX_BAD_LENGTH))
            for number in range(MAX_BAD_WORDS // 5)
        ],
    ],
)
def test_the_longest_words_may_be_begun_to_their_last_character(words: list[str]) -> None:
    assert write(demo_grammars(), demo_tokenizer(), words, begun(words)) > 5
