"""What a request asks of a worker, which workers can take it at all, and, where none can, what there is none of: clients and
operators are told. Operators also of what there would be none of without a worker that drains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jdisagg.core.fleet import Member
from jdisagg.core.requests import GrammarKind, Role
from jdisagg.core.told import few_of
from jdisagg.router.entry import Entry
from jdisagg.router.partners import differing
from jdisagg.router.prefixes import NOWHERE, Near


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a request cannot do without."""

    num_tokens: int = 0  # its context holds, output included
    prefill_tokens: int = 0  # one of the prefill workers holds, where it computes no prompts itself
    grammar: GrammarKind | None = None  # what its grammar is written in

    def are_served_by(self, member: Member) -> bool:
        """Whether it serves such a grammar, or none is asked for."""
        return self.grammar is None or self.grammar in member.grammars


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What speaks for one of those workers before another; how much, `Fleet.choose` says."""

    but_not: frozenset[str] = frozenset()  # addresses: only as a last resort
    num_tokens: int = 0  # its context holds
    home: str = ""  # address of the worker that its siblings have; "" = none has
    near: Near = NOWHERE  # who had how much of the prompt
    bits: str = ""  # of what the client has so far; "" = any
    kin: bytes = b""  # equal for requests that are to go to the same of equally busy ones


ANY_REQUEST, NO_WISHES = Needs(), Wishes()


class Usable(NamedTuple):
    """Exactly one of `entries` and `lacks` is empty."""

    entries: list[Entry]
    lacks: str
    is_too_long: bool = False  # all that lacks is a prefill worker that holds the prompt


def prefill_of(entries: Iterable[Entry]) -> list[Entry]:
    """Prefill workers that take requests."""
    return [entry for entry in entries if entry.member.role is Role.PREFILL and not entry.member.draining]


def usable(entries: Sequence[Entry], prefill: Sequence[Entry], needs: Needs) -> Usable:
    """Of `entries`, which have the weights that are asked for, the decode and unified workers that can take a request. All of
    the `prefill` workers take it, if they hold it."""
    there = [entry for entry in entries if entry.member.decodes and entry.serves]
    if not there:
        return Usable([], _nobody(entries))
    serves = [] if needs.grammar is None else [f"serves {needs.grammar.value} grammars"]
    there, all_of_them = [entry for entry in there if needs.are_served_by(entry.member)], there
    if not there:
        return Usable([], f"no decode or unified worker that is connected {serves[0]} ({_named(all_of_them)})")
    num_tokens = needs.num_tokens
    holding = [entry for entry in there if num_tokens <= entry.member.card.max_model_len]
    if not holding:
        longest = max(entry.member.card.max_model_len for entry in there)
        held = f"{' and '.join(['is connected', *serves])} holds {num_tokens} tokens (at most {longest})"
        return Usable([], f"no decode or unified worker that {held}")
    staying = [entry for entry in holding if not entry.member.draining]
    if not staying:
        which = serves if len(holding) == len(there) else [*serves, f"holds {num_tokens} tokens"]
        return Usable([], f"every decode or unified worker{_that(which)} is draining ({_named(holding)})")
    return _with_prefill(staying, prefill, needs.prefill_tokens, serves)


def missing_without(entry: Entry, entries: Iterable[Entry]) -> str:
    """What nobody of `entries`, which are all, does any more once this one of them drains, in words; "" = others do its
    work."""
    draining = replace(entry, member=replace(entry.member, draining=True))
    there = [draining if each is entry else each for each in entries]
    prefill, weights = prefill_of(there), entry.member.card.fingerprint
    if lacks := usable(there, prefill, ANY_REQUEST).lacks:
        return f"nobody is left for new requests: {lacks}"
    if entry.member.decodes or any(peer.member.card.fingerprint == weights for peer in prefill):
        return ""
    members = [each.member for each in there if each.member.decodes and not each.member.draining]
    served = [member for member in members if member.card.fingerprint == weights]
    if not served:
        return ""
    do_not = all(member.needs_prefill for member in served)
    then = "decode workers of these do not, and get no new requests" if do_not else "decode workers do it themselves"
    return f"no other of its weights computes prompts: {then}"


def _with_prefill(staying: list[Entry], prefill: Sequence[Entry], prefill_tokens: int, serves: list[str]) -> Usable:
    """Those that compute prompts themselves, or have a prefill worker of their weights that holds so many tokens. `serves`:
    what the prefill workers can."""
    held: dict[str, int] = {}  # by fingerprint
    for peer in prefill:
        held[peer.member.card.fingerprint] = max(held.get(peer.member.card.fingerprint, 1), peer.member.card.max_model_len)
    paired = [entry for entry in staying if not entry.member.needs_prefill or entry.member.card.fingerprint in held]
    found = [
        entry for entry in paired if not entry.member.needs_prefill or prefill_tokens <= held[entry.member.card.fingerprint]
    ]
    if found:
        return _ready(found, serves)
    if paired:
        most = max(held[entry.member.card.fingerprint] for entry in paired)
        lacks = f"no prefill worker{_that(serves)} holds {prefill_tokens} tokens (at most {most}; --local-prefill never)"
        return Usable([], lacks, is_too_long=True)
    why = ""
    if prefill:
        unlike = differing([peer.member for peer in prefill], [entry.member for entry in staying])
        why = f"; {unlike} must be the same on both"
    pairs = _that([*serves, f"pairs with {_named(staying)}"])
    return Usable([], f"no prefill worker{pairs} (--local-prefill never){why}")


def _ready(found: list[Entry], serves: list[str]) -> Usable:
    """Those that do not say that they cannot: a decode worker that never computes prompts may reach no prefill worker."""
    if ready := [entry for entry in found if not entry.member.not_ready]:
        return Usable(ready, "")
    whys = few_of([f"{entry.member.worker}: {entry.member.not_ready}" for entry in found], "; ")
    return Usable([], f"no decode or unified worker{_that(serves)} is ready ({whys})")


def _nobody(entries: Sequence[Entry]) -> str:
    """None of these has a Run stream that says something: which of them fell silent, or send heartbeats all the same."""
    if silent := [entry for entry in entries if entry.linked]:
        return f"no decode or unified worker is heard ({_named(silent)} fell silent)"
    unreached = [entry for entry in entries if entry.reach.why_not]
    have, them = ("has", "it") if len(unreached) == 1 else ("have", "them")
    which = f" ({_named(unreached)} {have} registered, and this router does not reach {them})" if unreached else ""
    return f"no decode or unified worker is connected{which}"


def _that(verbs: list[str]) -> str:
    return f" that {' and '.join(verbs)}" if verbs else ""


def _named(entries: Sequence[Entry]) -> str:
    return few_of([entry.member.worker for entry in entries], ", ")
