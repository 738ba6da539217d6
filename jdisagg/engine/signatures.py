"""What each of `jdisagg.engine.functions` takes of what lies on the device, and what of it the result may take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


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
