"""What a fingerprint is made of, and what tells two of them apart: so that a refusal names the part that differs."""

from __future__ import annotations

from dataclasses import dataclass

Parts = tuple[tuple[str, str], ...]  # (name, value), in the order they are told; empty = the worker does not say

_ABSENT = "(none)"  # in place of the value of a part that one side does not have: it is older or newer


@dataclass(frozen=True, slots=True)
class Difference:
    """The first part that differs, and the names of the others."""

    name: str
    wanted: str
    got: str
    also: tuple[str, ...] = ()


def difference(wanted: Parts, got: Parts) -> Difference | None:
    """None when no part differs, or one side does not say what its fingerprint is made of."""
    if not wanted or not got:
        return None
    ours, theirs = dict(wanted), dict(got)
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    first, *others = names
    return Difference(first, ours.get(first, _ABSENT), theirs.get(first, _ABSENT), tuple(others))
