"""Where each slot's sequence stands in its grammar, and so what the next step may sample there.

The host knows the tokens of a step only after it: a sequence with a grammar is planned again when they are committed, and its
mask goes to the device before the step that samples by it. One that cannot go on samples what it likes, and its request is
refused with the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar
from jdisagg.sched.plan import Admit, Plan, Sampled


class Matcher(Protocol):
    """`jdisagg.text.grammar.Matcher`; steps are run without it, too."""

    @property
    def error(self) -> str: ...

    def advance(self, token_ids: Sequence[int]) -> None: ...

    def allowed(self) -> bytes: ...


class Grammars(Protocol):
    """`jdisagg.text.grammar.Grammars`."""

    def matcher(self, grammar: Grammar) -> Matcher: ...


Place = Matcher | str  # or why there is none

_NOT_SERVED = "this worker cannot read the model's tokenizer for grammars"
_ANYTHING = b"\xff"


class GrammarRows:
    """Places of the slots whose requests have a grammar. Used by the engine's thread."""

    def __init__(self, grammars: Grammars | None, num_mask_bytes: int) -> None:
        """`num_mask_bytes`: what is read of a mask."""
        self._grammars = grammars
        self._anything = _ANYTHING * num_mask_bytes
        self._places: dict[int, Place] = {}

    def evict(self, slot: int) -> None:
        """The slot is empty."""
        self._places.pop(slot, None)

    def admit(self, admit: Admit) -> None:
        """A sequence is in a slot, and stands behind the tokens it has."""
        if admit.sampling.grammar is None:
            self.evict(admit.slot)
        else:
            self._places[admit.slot] = self._place(admit)

    def sampling(self, plan: Plan) -> dict[int, Place]:
        """Slots with a grammar that `plan` has sample, and where they stand."""
        if not self._places:
            return {}
        slots = (*plan.decode, *(chunk.slot for chunk in plan.prefill if chunk.samples))
        return {slot: self._places[slot] for slot in slots if slot in self._places}

    def masks(self, places: Mapping[int, Place]) -> dict[int, bytes]:
        """See `Matcher.allowed`, by slot."""
        masks = {slot: self._anything if isinstance(place, str) else place.allowed() for slot, place in places.items()}
        return {slot: mask if len(mask) >= len(self._anything) else self._anything for slot, mask in masks.items()}

    def _place(self, admit: Admit) -> Place:
        grammar = admit.sampling.grammar
        assert grammar is not None
        if self._grammars is None:
            return _NOT_SERVED
        try:
            place = self._grammars.matcher(grammar)
        except InvalidRequest as error:
            return error.message
        place.advance(admit.generated_token_ids)
        return place


def advance(places: Mapping[int, Place], sampled: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """What a step sampled moves its `places` on; whose grammar had no such token, or was in no state to say, is `refused`."""
    return tuple(_advanced(places[one.slot], one) if one.slot in places else one for one in sampled)


def _advanced(place: Place, sampled: Sampled) -> Sampled:
    if isinstance(place, str):
        return replace(sampled, refused=place)
    if sampled.bad is None and not place.error:
        place.advance(sampled.token_ids)
    return replace(sampled, refused=place.error or None)
