"""Who is in the fleet and who should get the next request. Pure bookkeeping: time is passed in, nothing is sent.

A decode or unified worker can be chosen while it heartbeats, is linked (its Run stream stands), does not drain and has a
context that holds the request. Choice is by least load: of decode workers by requests, of prefill workers by the time that
their prompt tokens take (`core.speed`); a decode worker that failed lately is chosen only when there is no other. A prompt that
begins as an earlier one did goes where that went, whose cache may have it, while others have not much less to do: the longer
the beginning, the more. What a prefill worker's cache has no room for any more (`worker_cache`) does not count. Of equally
busy ones what begins alike gets the same, and what does not is spread.
Requests never cross `ModelCard.answers`: a fleet half old and half new weights serves both, each request within one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from weakref import WeakValueDictionary

from jdisagg.core.bits import UNLIKE_REQUESTS, UNLIKE_TOKENS, are_unlike
from jdisagg.core.errors import AddressTaken
from jdisagg.core.fleet import MAX_PREFILL_PEERS, SUSPECT_S, Key, Load, Member, Report, Standing
from jdisagg.core.requests import Role
from jdisagg.core.speed import taken_for
from jdisagg.router.entry import Entry, Reach, RunStream
from jdisagg.router.longest import Longest, LongestPrompts
from jdisagg.router.lots import lot_of, seat_of
from jdisagg.router.partners import Partners
from jdisagg.router.prefixes import NOTHING_KEPT, NOWHERE, Near
from jdisagg.router.silence import Silence
from jdisagg.router.standings import standings_of
from jdisagg.router.usable import ANY_REQUEST, NO_WISHES, Needs, Usable, Wishes, prefill_of, usable
from jdisagg.router.worker_cache import WorkerCache

NEAR_SHARE = 1.25  # of the least busy one's requests, that one which may have cached a part of the prompt may have, and besides
NEAR_LEAST, NEAR_TOKENS, NEAR_MOST = 2, 512, 8  # two, and one for each 512 tokens of that part, eight at most
AGAIN_SHARE = 0.25  # of what is computed a second time counts once more where all are busy: those that come later wait for it
SOME_TOKENS = 512  # that a prompt has of which nothing is known yet


class Fleet:
    """Members by address."""

    def __init__(self, *, dead_after_s: float, lease_s: float = 0.0) -> None:
        """`lease_s`: how long workers that are silent all at once are waited for, see `silence`."""
        self._dead_after_s = dead_after_s
        self._silence = Silence(dead_after_s, lease_s)
        self._entries: dict[str, Entry] = {}
        self._caches = WeakValueDictionary[Key, WorkerCache]()  # while a prompt remembers it: a process may go and come back
        self._longest, self._longest_prompts = Longest(), LongestPrompts()

    def register(self, member: Member, now_s: float) -> Entry | None:
        """Add a process. Returns the older process it replaces at that address, or None; the same one again is a heartbeat:
        what it is, it said at first.

        Raises AddressTaken while the other one is alive: two cannot have one address, so that what comes now was sent long ago,
        by a process that is gone (or both advertise the same address: then the first one has it).
        """
        report = Report(member.load, member.draining, member.not_ready, member.alone, member.process.uptime_s)
        if self.heartbeat(member.address, member.epoch, report, now_s) is not None:
            return None
        old = self._entries.get(member.address)
        if old is not None and now_s - old.last_seen_s <= self._dead_after_s:
            raise AddressTaken(
                f"{member.worker} cannot register: {old.member.worker} of that address was heard less than "
                f"{self._dead_after_s:g} s ago; try again, or give each worker an address of its own"
            )
        entry = self._entries[member.address] = Entry(member, now_s)
        entry.cache = self._caches.setdefault(entry.key, entry.cache)
        return old

    def heartbeat(self, address: str, epoch: str, report: Report, now_s: float) -> Entry | None:
        """The process that sent it; None when it is not known."""
        if (entry := self.process(address, epoch)) is None:
            return None
        entry.member = dataclasses.replace(entry.member.reporting(report), load=entry.member.load)
        entry.last_seen_s = now_s
        if not entry.linked:  # its Run stream tells of every tick, in order with what became of our requests
            self.tell_load(entry, report.load)
        return entry

    def tell_load(self, entry: Entry, load: Load, num_cancelled: int = 0) -> None:
        """Take what the worker says; call it before what came with it ends requests of ours: both know of them then.
        `num_cancelled`: requests of ours that have ended here, and there as soon as it hears of it."""
        entry.member = dataclasses.replace(entry.member, load=load)
        entry.others = max(0, load.running + load.waiting - entry.pending - num_cancelled)
        entry.others_tokens = max(0, load.pending_prefill_tokens - entry.pending_tokens)

    def evict(self, now_s: float) -> list[Entry]:
        """Drop and return the workers whose heartbeats stopped; to be called now and then. A standing Run stream has better
        heartbeats of its own."""
        for longest in (self._longest, self._longest_prompts):
            longest.look(self._entries.values(), now_s)
        silent = self._silence.gone(self._entries.values(), now_s)
        for entry in silent:
            self.remove(entry)
        return silent

    def tell_quiet(self, entry: Entry, is_quiet: bool, now_s: float) -> None:
        """What the pulse of its Run stream says."""
        self._silence.tell(entry, is_quiet, now_s)

    def link(self, entry: Entry, now_s: float) -> None:
        """Its Run stream stands from now on."""
        entry.stream = RunStream(now_s, steady_s=self._silence.steady_s(now_s, again=entry.reach.had_stream))
        entry.reach = Reach(had_stream=True)

    def waits(self, entry: Entry, silent_s: float, now_s: float) -> bool:
        """Whether a worker whose Run stream is silent for so long is not taken for dead."""
        partners = Partners(self.members())
        heirs = (other for other in self._entries.values() if not (other.member.draining or is_idle(other, partners)))
        return self._silence.waits(entry, heirs, silent_s, now_s)

    def forgive(self, late_s: float, now_s: float) -> None:
        """This process slept `late_s` longer than it meant to: that is not the workers' silence. Who was heard meanwhile was
        silent for less than that."""
        for entry in self._entries.values():
            entry.last_seen_s = min(entry.last_seen_s + max(0.0, late_s), now_s)
            if entry.reach.misses:
                entry.reach.missing_since_s = min(entry.reach.missing_since_s + max(0.0, late_s), now_s)

    def remove(self, entry: Entry) -> None:
        """Drop one process; idempotent."""
        if self._entries.get(entry.member.address) is entry:
            del self._entries[entry.member.address]

    def process(self, address: str, epoch: str) -> Entry | None:
        """Who is there, if it is that process and not one before or after it."""
        entry = self._entries.get(address)
        return entry if entry is not None and entry.member.epoch == epoch else None

    def entries(self) -> list[Entry]:
        """Everybody, in order of registration."""
        return list(self._entries.values())

    def members(self) -> list[Member]:
        """Everybody, as they described themselves."""
        return [entry.member for entry in self._entries.values()]

    def longest(self, now_s: float) -> Member | None:
        """Who holds the longest requests, see `Longest`. None: nobody is here."""
        return self._longest.of(self._entries.values(), now_s)

    def most_prefill_tokens(self, now_s: float) -> int | None:
        """What the longest worker holds that computes prompts, see `LongestPrompts`. None: not known."""
        return self._longest_prompts.of(now_s)

    def standings(self, now_s: float) -> list[tuple[Member, Standing]]:
        """Everybody, and what is made of each, for operators."""
        return standings_of(self._entries.values(), now_s)

    def choose(self, answers: str | None, now_s: float, needs: Needs = ANY_REQUEST, wishes: Wishes = NO_WISHES) -> Entry | None:
        """The worker for the next request of those `answers` (None = any), of those that are `usable`: one that holds the
        tokens it wishes for before others, then the one at its home, one that reaches prefill workers of its weights, the one
        that had most of the prompt of those that are not much busier than the least busy one, and then less busy ones, as if
        those that compute other bits had UNLIKE_REQUESTS more and nothing of the prompt. Of equally busy ones all of one kin
        get the same, whoever else comes and goes."""
        there = self.usable(answers, needs).entries
        if not there:
            return None
        prefilled = {peer.member.card.fingerprint for peer in self._prefill(needs)}

        def standing(entry: Entry) -> tuple[bool, ...]:
            address = entry.member.address
            unpaired = entry.member.role is Role.DECODE and entry.member.card.fingerprint not in prefilled
            lonely = entry.member.alone or unpaired
            is_short = entry.member.card.max_model_len < wishes.num_tokens
            doubtful = address in wishes.but_not, entry.is_quiet, entry.suspect_until_s > now_s
            return (*doubtful, is_short, address != wishes.home, lonely)

        def busyness(entry: Entry) -> tuple[float, int]:
            busy, pending = entry.busy()
            return busy + UNLIKE_REQUESTS * are_unlike(wishes.bits, entry.member.bits), pending

        best = min(standing(entry) for entry in there)
        equals = [entry for entry in there if standing(entry) == best]
        least = min(map(busyness, equals))[0]

        def rank(entry: Entry) -> tuple[object, ...]:
            busy, pending = busyness(entry)
            cached = 0 if are_unlike(wishes.bits, entry.member.bits) else wishes.near.decodes.get(entry.key, 0)
            if busy > least * NEAR_SHARE + min(NEAR_MOST, NEAR_LEAST + cached / NEAR_TOKENS):
                cached = 0
            return -cached, busy, pending, lot_of(entry, wishes.kin)

        return min(equals, key=rank)

    def usable(self, answers: str | None, needs: Needs = ANY_REQUEST) -> Usable:
        """Whom `choose` chooses from, of those `answers` (None = any), or what there is none of."""
        those = [entry for entry in self._entries.values() if answers is None or entry.member.card.answers == answers]
        return usable(those, self._prefill(needs), needs)

    def _prefill(self, needs: Needs) -> list[Entry]:
        """Prefill workers that take requests with such a grammar."""
        return [entry for entry in prefill_of(self._entries.values()) if needs.are_served_by(entry.member)]

    def prefill_peers(self, fingerprint: str, needs: Needs, near: Near, kin: bytes = b"", *, bits: str = "") -> list[Entry]:
        """Prefill workers of that fingerprint that can compute the prompt: first who will be done with it first, at its speed,
        without what is cached, of it (`near`) and of those before it; as if one that does not compute `bits` ("" = any do) had
        none of it cached and UNLIKE_TOKENS more to compute. Of equals the same for all requests of one `kin`."""
        peers = [
            peer
            for peer in self._prefill_of(fingerprint, bits, near, needs.prefill_tokens, lambda peer: lot_of(peer, kin))
            if needs.prefill_tokens <= peer.member.card.max_model_len and needs.are_served_by(peer.member)
        ]
        return peers[:MAX_PREFILL_PEERS]

    def prefill_named(self, worker: str) -> Entry | None:
        """The prefill worker that calls itself so."""
        return next(
            (peer for peer in self._entries.values() if peer.member.role is Role.PREFILL and peer.member.worker == worker), None
        )

    def prefill_for(self, entry: Entry) -> tuple[str, ...] | None:
        """Addresses of all prefill workers for that decode worker, in the order of `prefill_peers`; None for other workers."""
        if entry.member.role is not Role.DECODE:
            return None
        address, fingerprint, bits = entry.member.address, entry.member.card.fingerprint, entry.member.bits
        peers = self._prefill_of(fingerprint, bits, NOWHERE, SOME_TOKENS, lambda peer: seat_of(peer.member.address, address))
        return tuple(peer.member.address for peer in peers)

    def _prefill_of(
        self, fingerprint: str, bits: str, near: Near, num_tokens: int, lot: Callable[[Entry], bytes]
    ) -> list[Entry]:
        """Who is done first with a prompt of so many tokens, as if those that do not compute `bits` were busier; `lot` draws
        among equals."""
        peers = [peer for peer in self._prefill(ANY_REQUEST) if peer.member.card.fingerprint == fingerprint]
        num_busy = sum(peer.pending > 0 or peer.others_tokens > 0 for peer in peers)
        worth = 1.0 + AGAIN_SHARE * (num_busy / max(1, len(peers))) ** 2  # where half are busy, idle ones have time for it

        def rank(peer_and_speed: tuple[Entry, float]) -> tuple[object, ...]:
            peer, speed = peer_and_speed
            num_waiting = peer.pending_tokens - peer.pending_cached + peer.others_tokens
            cached = near.prefills.get(peer.key, NOTHING_KEPT).num_tokens
            saved = -UNLIKE_TOKENS if are_unlike(bits, peer.member.bits) else worth * cached
            return (num_waiting + worth * num_tokens - saved) / speed, peer.pending, lot(peer)

        speeds = taken_for([peer.member.load.speed for peer in peers])
        return [peer for peer, _ in sorted(zip(peers, speeds, strict=True), key=rank)]

    def suspect(self, entry: Entry, now_s: float) -> None:
        """It failed somebody."""
        entry.suspect_until_s = now_s + SUSPECT_S


def is_idle(entry: Entry, partners: Partners) -> bool:
    """It gets no requests, by its own word or since it has nobody to compute prompts."""
    return bool(entry.member.not_ready) or partners.leave_idle(entry.member)
