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
from jdisagg.engine.signatures import SIGNATURES, Signature


@dataclass(frozen=True, slots=True)
class Executable:
    """One shape of one of `jdisagg.engine.functions`."""

    name: str  # of the function
    size: int
    unit: str  # what `size` counts
    arguments: tuple[Any, ...]  # host arrays, behind what the signature takes

    @property
    def shape(self) -> str:
        """In words."""
        return f"{self.size} {self.unit}"

    @property
    def signature(self) -> Signature:
        """Of its function."""
        return SIGNATURES[self.name]


def executables(shape: RunnerShape, sizes: DeviceShape) -> Iterator[Executable]:
    """All that a runner of `shape` can need, in the order in which they are warmed. The arguments are padding alone."""
    dummy = sizes.max_num_seqs
    empty = updates.empty_admissions(num_slots=dummy, width=sizes.pages_per_seq, vocab_size=sizes.vocab_size)
    yield Executable("admit", updates.ADMIT_ROWS, "slots", (empty,))
    yield Executable("append", dummy, "pages", (updates.empty_appends(dummy),))
    yield Executable("history", updates.HISTORY_CELLS, "cells", updates.empty_history(dummy))
    yield Executable("allow", updates.MASK_ROWS, "slots", updates.empty_masks(dummy, sizes.vocab_size))
    if shape.exact:
        yield Executable("exact", EXACT_ROWS, "rows", (empty_exact(dummy),))
    for bucket in shape.prefill:
        yield Executable("prefill", bucket.num_tokens, "tokens", (empty_prefill(bucket, dummy),))
    if shape.prefill:
        yield Executable("score", SCORE_ROWS, "tokens", (empty_score(),))
    for rows in shape.decode:
        yield Executable("decode", rows, "rows", (np.full(rows, dummy, np.int32),))
    nowhere = np.zeros((2, sizes.chunk_tokens), np.int32)
    yield Executable("export", sizes.chunk_tokens, "tokens", (nowhere,))  # everywhere: forks, host copies, NanSearch
    yield Executable("import", sizes.chunk_tokens, "tokens", (nowhere,))
