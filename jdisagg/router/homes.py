"""Where the choices of one prompt are: together, so that they share its KV, and on the same weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.router.prefixes import Beginning


@dataclass(eq=False, slots=True, weakref_slot=True)
class Home:
    """Of all choices of a prompt that live, or of the only one."""

    address: str = ""  # of the worker that one was sent to last, which the others follow; "" = none was yet
    beginnings: list[Beginning] = field(default_factory=list[Beginning])  # of the prompt, from `Placement.begin` on
    _answers: str | None = None  # see `ModelCard`
    _has_spoken: bool = False  # a client got something of one of them

    def settle(self, address: str, answers: str) -> None:
        """One was sent there. Once one has spoken, `answers` must be its own."""
        assert not self._has_spoken or self._answers == answers
        self.address, self._answers = address, answers

    @property
    def spoken_answers(self) -> str | None:
        """The weights a client got something from; None while it got nothing."""
        return self._answers if self._has_spoken else None

    def speak(self, answers: str) -> bool:
        """A client is about to get the first of a choice on those weights; False when its siblings are on others."""
        self._has_spoken |= self._answers == answers
        return self._answers == answers
