"""What becomes of the work of a worker that drains, or would: for logs, and for operators before they drain one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jdisagg.router.entry import Entry
from jdisagg.router.usable import ANY_REQUEST, prefill_of, usable


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
