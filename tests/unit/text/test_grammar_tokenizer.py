"""Grammars over tokenizers whose tokens write a space as another character."""

from __future__ import annotations

import re

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdisagg.text.grammar import Grammars
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.grammar_rig import allowed, regex, vocabulary, walk

EOS = (2,)
SPACE = decoders.Replace("\u2581", " ")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [" ab c", "ab", "a  b", "bab", "  c", "c<e>", "ä b", "\u2581"]
DECODERS = {
    "llama": [SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "gemma": [SPACE, decoders.ByteFallback(), decoders.Fuse()],
    "bytes, then metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
    "metaspace": [decoders.Metaspace()],
}


def build(kind: str) -> Tokenizer:
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "\u2581\u2581", "b\u2581", "<", "e", ">"]
    tokens = ["<unk>", "<s>", "<e>", *(BYTES if kind != "metaspace" else ["ä"]), *words]
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab"), ("\u2581", "\u2581"), ("b", "\u2581")]
    table = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(table, merges, unk_token="<unk>", byte_fallback=kind != "metaspace"))
    backend.add_special_tokens(["<unk>", "<s>", "<e>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)  # pyright: ignore[reportAttributeAccessIssue]
    parts = DECODERS[kind]
    backend.decoder = parts[0] if len(parts) == 1 else decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(backend)


def continued(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Their text behind a prompt."""
    stream = tokenizer.detokenizer(before=tokenizer.encode("c"))
    return "".join(map(stream.push, token_ids)) + stream.flush()


@pytest.mark.parametrize("kind", DECODERS)
def test_a_token_is_allowed_where_its_text_behind_a_prompt_is(kind: str) -> None:
    tokenizer = build(kind)
    grammars = Grammars(vocabulary(tokenizer, EOS))
    texts = {token_id: continued(tokenizer, [token_id]) for token_id in range(3, tokenizer.vocab_size)}
    for text in TEXTS[:5]:
        two = (text, "zz")  # of one alone, the library leaves one way to write it
        first = {token_id for token_id, own in texts.items() if own and any(whole.startswith(own) for whole in two)}
        assert allowed(grammars.matcher(regex("|".join(map(re.escape, two))))) == first, text


@pytest.mark.parametrize("kind", DECODERS)
def test_what_a_grammar_leads_to_is_of_it_and_its_text_is_the_streams(kind: str) -> None:
    tokenizer = build(kind)
    grammars, told = Grammars(vocabulary(tokenizer, EOS)), set[str]()
    expression = "|".join(map(re.escape, TEXTS[:7]))
    for seed in range(24):
        token_ids = walk(grammars.matcher(regex(expression)), EOS, seed)
        assert token_ids[-1] in EOS
        told.add(continued(tokenizer, token_ids[:-1]))
    assert len(told) > 3
    assert told <= set(TEXTS)


def test_a_decoder_that_writes_the_name_of_a_byte_is_refused() -> None:
    tokenizer = build("llama")
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="<0x0A>"):
        Grammars(vocabulary(Tokenizer(backend), EOS))
