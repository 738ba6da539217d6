"""How long the requests are that a fleet takes: as long as its longest worker, even while that one restarts."""

from __future__ import annotations

from collections.abc import Collection

from jdisagg.core.fleet import Member
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry

AWAY_S = 60.0  # how long a worker that left may take to come back, before the model is no longer than the others


class Longest:
    """Remembers who it was. Time is passed in."""

    def __init__(self) -> None:
        self._member: Member | None = None
        self._seen_s = 0.0  # when it was last the longest that was there

    def look(self, entries: Collection[Entry], now_s: float) -> None:
        """To be called now and then, with everybody."""
        if (found := _longest(entries)) is not None and not self._outdoes(found, now_s):
            self._member, self._seen_s = found, now_s

    def of(self, entries: Collection[Entry], now_s: float) -> Member | None:
        """Who holds the longest requests of those that take any: where nobody does, of all that decode. One that was here a
        moment ago counts: its requests wait for it, as those of any model do. None: nobody is here who decodes."""
        found = _longest(entries)
        return self._member if found is not None and self._outdoes(found, now_s) else found

    def _outdoes(self, found: Member, now_s: float) -> bool:
        """Whether the one seen before, of the same model, is longer and not gone for long."""
        before = self._member
        if before is None or now_s - self._seen_s >= AWAY_S:
            return False
        models = [(member.card.name, member.card.vocab_size, member.card.eos_token_ids) for member in (before, found)]
        return models[0] == models[1] and before.card.max_model_len > found.card.max_model_len


class LongestPrompts:
    """How many tokens the workers hold that compute prompts and were here of late. Time is passed in."""

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}  # when one that holds so many was last here
        self._began_s: float | None = None

    def look(self, entries: Collection[Entry], now_s: float) -> None:
        """To be called now and then, with everybody."""
        if self._began_s is None:
            self._began_s = now_s
        members = [entry.member for entry in entries]
        here = {one.card.max_model_len: now_s for one in members if one.role is Role.PREFILL or not one.needs_prefill}
        self._seen_s = {most: seen_s for most, seen_s in self._seen_s.items() if now_s - seen_s < AWAY_S} | here

    def of(self, now_s: float) -> int | None:
        """None: not known yet, as one may be away since before the first look; or nobody was here."""
        known = self._began_s is not None and now_s - self._began_s >= AWAY_S
        return max(self._seen_s, default=None) if known else None


def _longest(entries: Collection[Entry]) -> Member | None:
    """Of those that decode: prefill workers may call the model otherwise, and be shorter."""

    def rank(entry: Entry) -> tuple[bool, int]:
        return entry.linked and not entry.member.draining, entry.member.card.max_model_len

    decoding = (entry for entry in entries if entry.member.decodes)
    return found.member if (found := max(decoding, key=rank, default=None)) is not None else None
