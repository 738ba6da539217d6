"""From a plan's admissions and page appends to the NumPy rows of the state updates, in fixed sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from jdisagg.core.requests import MAX_STOP_TOKEN_IDS, SamplingParams
from jdisagg.engine.state import FLOAT_COLUMNS, INT_COLUMNS, PROMPT_BIT, Admissions, words_of
from jdisagg.sched.plan import Admit, PageAppend

ADMIT_ROWS = 4  # admissions per update
MASK_ROWS = 16  # slots whose grammars say what is allowed, per update
HISTORY_CELLS = 1024  # (slot, token) cells per update


def pack_admissions(admits: Sequence[Admit], *, num_slots: int, width: int, vocab_size: int) -> Iterator[Admissions]:
    """Rows of the state, ADMIT_ROWS at a time; page tables are padded to `width` with the null page."""
    for first in range(0, len(admits), ADMIT_ROWS):
        rows = empty_admissions(num_slots=num_slots, width=width, vocab_size=vocab_size)
        for number, admit in enumerate(admits[first : first + ADMIT_ROWS]):
            pages, sampling = admit.page_table[0], admit.sampling
            tokens = len(admit.prompt_token_ids) + len(admit.generated_token_ids)
            last = admit.generated_token_ids[-1] if admit.generated_token_ids else admit.prompt_token_ids[-1]
            assert len(pages) <= width, f"slot {admit.slot}: {len(pages)} pages, room for {width}"
            rows.cursor[:, number] = admit.slot, last, tokens
            rows.page_table[number, : len(pages)] = pages
            rows.floats[number] = [getattr(sampling, name) for name in FLOAT_COLUMNS]
            num_stops = len(admit.stop_ids)
            assert num_stops <= MAX_STOP_TOKEN_IDS, f"request {admit.request_id}: {num_stops} stop ids passed intake"
            rows.ints[number, : len(INT_COLUMNS)] = _ints(admit, vocab_size)
            rows.ints[number, len(INT_COLUMNS) : len(INT_COLUMNS) + num_stops] = admit.stop_ids
        yield rows


def empty_admissions(*, num_slots: int, width: int, vocab_size: int) -> Admissions:
    """Rows that change nothing: they name a slot past the dummy."""
    arrays: dict[str, Any] = {
        "cursor": np.zeros((3, ADMIT_ROWS), np.int32),
        "page_table": np.zeros((ADMIT_ROWS, width), np.int32),
        "floats": np.zeros((ADMIT_ROWS, len(FLOAT_COLUMNS)), np.float32),
        "ints": np.full((ADMIT_ROWS, len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS), vocab_size, np.int32),
    }
    arrays["cursor"][0] = num_slots + 1
    return Admissions(**arrays)


def _ints(admit: Admit, vocab_size: int) -> list[int]:
    sampling = admit.sampling
    values = {
        "top_k": vocab_size if sampling.top_k is None or sampling.top_k <= 0 else min(sampling.top_k, vocab_size),
        "seed": int(np.uint32(sampling.seed & 0xFFFFFFFF).view(np.int32)),
        "choice": admit.choice,
        "min_length": len(admit.prompt_token_ids) + sampling.min_tokens,
        "num_top": -1 if sampling.logprobs is None else sampling.logprobs,
        "shaped": int(is_shaped(sampling)),
        "constrained": int(sampling.grammar is not None),
    }
    return [values[name] for name in INT_COLUMNS]


def is_shaped(sampling: SamplingParams) -> bool:
    """True when the request's tokens change its logits, so its history has to be on the device."""
    penalties = (sampling.repetition_penalty != 1.0, sampling.presence_penalty != 0.0, sampling.frequency_penalty != 0.0)
    return any(penalties) or bool(sampling.logit_bias)


def pack_history(admit: Admit, *, num_slots: int, vocab_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cells (i32[3, C], f32[C]) that rebuild counts and bias of a shaped request."""
    amounts = dict.fromkeys(admit.prompt_token_ids, PROMPT_BIT)
    for token, count in Counter(admit.generated_token_ids).items():
        amounts[token] = amounts.get(token, 0) + count
    biases, num = dict(admit.sampling.logit_bias), len(amounts)
    cells = np.zeros((3, num + len(biases)))  # token, amount, added; long prompts have tens of thousands
    cells[0] = np.fromiter(chain(amounts, biases), np.float64)
    cells[1, :num], cells[2, num:] = np.fromiter(amounts.values(), np.float64), np.fromiter(biases.values(), np.float64)
    cells = cells[:, (cells[0] >= 0) & (cells[0] < vocab_size)]
    for first in range(0, cells.shape[1], HISTORY_CELLS):
        some = cells[:, first : first + HISTORY_CELLS]
        entries, bias = empty_history(num_slots)
        entries[0, : some.shape[1]] = admit.slot
        entries[1:, : some.shape[1]], bias[: some.shape[1]] = some[:2], some[2]
        yield entries, bias


def empty_history(num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Cells that change nothing."""
    entries = np.zeros((3, HISTORY_CELLS), np.int32)
    entries[0] = num_slots + 1
    return entries, np.zeros(HISTORY_CELLS, np.float32)


def pack_masks(masks: Mapping[int, bytes], *, num_slots: int, vocab_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slots i32[C] and words u32[C, W] of `allow`, C = MASK_ROWS, from the bits of each slot; those past the vocabulary are
    left out."""
    entries = list(masks.items())
    for first in range(0, len(entries), MASK_ROWS):
        slots, words = empty_masks(num_slots, vocab_size)
        for number, (slot, bits) in enumerate(entries[first : first + MASK_ROWS]):
            slots[number] = slot
            words[number] = np.frombuffer(bits, "<u4", words.shape[1])
        yield slots, words


def empty_masks(num_slots: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Words that change nothing."""
    return np.full(MASK_ROWS, num_slots + 1, np.int32), np.zeros((MASK_ROWS, words_of(vocab_size)), np.uint32)


def pack_appends(appends: Sequence[PageAppend], *, num_slots: int) -> Iterator[np.ndarray]:
    """Entries i32[3, C] of `append_pages`, C = `num_slots`."""
    for first in range(0, len(appends), num_slots):
        entries = empty_appends(num_slots)
        for number, append in enumerate(appends[first : first + num_slots]):
            entries[:, number] = append.slot, append.index, append.page
        yield entries


def empty_appends(num_slots: int) -> np.ndarray:
    """Entries that change nothing."""
    entries = np.zeros((3, num_slots), np.int32)
    entries[0] = num_slots + 1
    return entries
