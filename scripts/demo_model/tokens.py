"""The demo's tokenizer (byte-level BPE) and its packed training stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo_model.chat import BOS, EOS, SPECIAL_TOKENS

BOS_ID, EOS_ID = SPECIAL_TOKENS.index(BOS), SPECIAL_TOKENS.index(EOS)
# Words with one leading mark (" name", ".name"), short numbers, runs of marks, line ends with the indentation after them.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose first ids are the special tokens; encoding adds BOS when special tokens are asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


@dataclass(frozen=True)
class Stream:
    """Documents as token ids; `batches` deals them out in an order that (seed, tokens consumed) determines."""

    documents: list[np.ndarray]  # i32[n] each: BOS, text, EOS
    seed: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(len(document) for document in self.documents)

    def batches(self, *, rows: int, seq_len: int, start_token: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (tokens, segments), both i32[rows, seq_len + 1], without end; segments number the document of each token.

        A resumed run passes the tokens consumed so far and continues in the same epoch (exactly, when the shape is the same).
        """
        per_epoch = (self.num_tokens - seq_len - 1) // (rows * seq_len)
        if per_epoch < 1:
            raise ValueError(f"{self.num_tokens} training tokens do not fill one batch of {rows} x {seq_len}")
        epoch, used = divmod(start_token // (rows * seq_len), per_epoch)
        while True:
            tokens, segments, starts = self._epoch(epoch, seq_len)
            for index in range(used, per_epoch):
                at = starts[index * rows : (index + 1) * rows, None] + np.arange(seq_len + 1)
                yield tokens[at], segments[at]
            epoch, used = epoch + 1, 0

    def _epoch(self, epoch: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shuffled documents end to end, cut at a random offset into windows in random order."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.documents))
        tokens = np.concatenate([self.documents[i] for i in order])
        segments = np.repeat(np.arange(len(order), dtype=np.int32), [len(self.documents[i]) for i in order])
        offset = int(rng.integers(seq_len))
        starts = offset + seq_len * rng.permutation((len(tokens) - offset - 1) // seq_len)
        return tokens, segments, starts


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Each text as BOS, its tokens, EOS. Special tokens written in chat documents become their ids."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([BOS_ID, *one.ids, EOS_ID], np.int32) for one in encoded]
