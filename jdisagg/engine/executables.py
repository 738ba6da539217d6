"""Every executable of a worker, with host arguments that change nothing: what is compiled and run before READY."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdisagg.engine import updates
from jdisagg.engine.buckets import EXACT_ROWS, SCORE_ROWS
from jdisagg.engine.device import DeviceShape
from jdisagg.engine.packing import empty_exact, empty_prefill, empty_score
from jdisagg.engine.runner import RunnerShape

STATE_UPDATES = ("admit", "append", "history", "allow")  # small, of the state alone


@dataclass(frozen=True, slots=True)
class Executable:
    """One shape of one of `jdisagg.engine.functions`."""

    name: str  # of the function
    shape: str  # in words
    size: int  # tokens or rows that the words count
    arguments: tuple[Any, ...]  # host arrays: what follows parameters, cache, state, hidden rows and piece


def executables(shape: RunnerShape, sizes: DeviceShape) -> Iterator[Executable]:
    """All that a runner of `shape` can need, in the order in which they are warmed. The arguments are padding alone."""
    dummy = sizes.max_num_seqs
    empty = updates.empty_admissions(num_slots=dummy, width=sizes.pages_per_seq, vocab_size=sizes.vocab_size)
    yield Executable("admit", f"{updates.ADMIT_ROWS} slots", updates.ADMIT_ROWS, (empty,))
    yield Executable("append", f"{dummy} pages", dummy, (updates.empty_appends(dummy),))
    cells = updates.HISTORY_CELLS
    yield Executable("history", f"{cells} cells", cells, updates.empty_history(dummy))
    masks = updates.MASK_ROWS
    yield Executable("allow", f"{masks} slots", masks, updates.empty_masks(dummy, sizes.vocab_size))
    if shape.exact:
        yield Executable("exact", f"{EXACT_ROWS} rows", EXACT_ROWS, (empty_exact(dummy),))
    for bucket in shape.prefill:
        tokens = bucket.num_tokens
        yield Executable("prefill", f"{tokens} tokens", tokens, (empty_prefill(bucket, dummy),))
    if shape.prefill:
        yield Executable("score", f"{SCORE_ROWS} tokens", SCORE_ROWS, (empty_score(),))
    for rows in shape.decode:
        yield Executable("decode", f"{rows} rows", rows, (np.full(rows, dummy, np.int32),))
    nowhere, piece = np.zeros((2, sizes.chunk_tokens), np.int32), f"{sizes.chunk_tokens} tokens"
    yield Executable("export", piece, sizes.chunk_tokens, (nowhere,))  # everywhere: forks, host copies, NanSearch
    yield Executable("import", piece, sizes.chunk_tokens, (nowhere,))
