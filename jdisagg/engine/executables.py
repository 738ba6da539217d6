"""Every executable of a worker, with host arguments that change nothing: what is compiled and run before READY."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from jdisagg.engine import updates
from jdisagg.engine.buckets import EXACT_ROWS, SCORE_ROWS
from jdisagg.engine.device import DeviceShape
from jdisagg.engine.packing import empty_exact, empty_prefill, empty_score
from jdisagg.engine.runner import RunnerShape


class Operand(Enum):
    """What lies on the device."""

    PARAMS = auto()
    POOL = auto()  # cache of all KV groups
    GROUP = auto()  # cache of one
    STATE = auto()
    HIDDEN = auto()  # that a prefill step left
    PIECE = auto()


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes before its host arguments, in order, and what of it the result may take over."""

    takes: tuple[Operand, ...]
    donates: tuple[Operand, ...] = ()


_STEP = Signature((Operand.PARAMS, Operand.POOL, Operand.STATE), donates=(Operand.POOL, Operand.STATE))
_UPDATE = Signature((Operand.STATE,), donates=(Operand.STATE,))
MODEL_STEPS = ("prefill", "decode", "exact")  # run the layers
STATE_UPDATES = ("admit", "append", "history", "allow")  # small
SIGNATURES: Mapping[str, Signature] = {
    **dict.fromkeys(MODEL_STEPS, _STEP),
    **dict.fromkeys(STATE_UPDATES, _UPDATE),
    "score": Signature((Operand.PARAMS, Operand.HIDDEN)),
    "export": Signature((Operand.GROUP,)),
    "import": Signature((Operand.GROUP, Operand.PIECE), donates=(Operand.GROUP,)),
}


@dataclass(frozen=True, slots=True)
class Executable:
    """One shape of one of `jdisagg.engine.functions`."""

    name: str  # of the function
    shape: str  # in words
    size: int  # tokens or rows that the words count
    arguments: tuple[Any, ...]  # host arrays, behind what the signature takes

    @property
    def signature(self) -> Signature:
        """Of its function."""
        return SIGNATURES[self.name]


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
