"""Where the choices of one request are: together, so that they share the KV of their prompt, and on the same weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Home:
    num_members: int = 0
    address: str = ""
    answers: str | None = None  # see `ModelCard`
    has_spoken: bool = False  # a client got something of one of them


class Homes:
    """Address and weights by fork group, while any request of the group lives. "" is no group."""

    def __init__(self) -> None:
        self._homes: dict[str, _Home] = {}

    def enter(self, group: str) -> None:
        """A request of the group came."""
        if group:
            self._homes.setdefault(group, _Home()).num_members += 1

    def leave(self, group: str) -> None:
        """A request of the group ended."""
        if group:
            home = self._homes[group]
            home.num_members -= 1
            if not home.num_members:
                del self._homes[group]

    def settle(self, group: str, address: str, answers: str) -> None:
        """One of the group was sent there; the others follow. Once the group has spoken, `answers` must be its own."""
        if group:
            home = self._homes[group]
            assert not home.has_spoken or home.answers == answers
            home.address, home.answers = address, answers

    def of(self, group: str) -> str:
        """Where the group is, "" when it is nowhere yet."""
        return self._homes[group].address if group else ""

    def spoken_answers(self, group: str) -> str | None:
        """The weights a client got something from; None while it got nothing."""
        home = self._homes[group] if group else _Home()
        return home.answers if home.has_spoken else None

    def speak(self, group: str, answers: str) -> bool:
        """A client is about to get the first of a request on those weights; False when its siblings are on others."""
        if not group:
            return True
        home = self._homes[group]
        home.has_spoken |= home.answers == answers
        return home.answers == answers
