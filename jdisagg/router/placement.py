"""Requests on workers: who gets the next attempt of one, what is counted for it there, and how it leaves."""

from __future__ import annotations

import hashlib
from array import array

from jdisagg.core.requests import Output, Provenance, Role
from jdisagg.router.booking import book
from jdisagg.router.entry import Entry
from jdisagg.router.flight import Flight
from jdisagg.router.homes import Homes
from jdisagg.router.prefixes import LastBeginnings, Near, Prefixes
from jdisagg.router.workers import Workers

KIN_TOKENS = 32  # of a prompt too short to be remembered


class Placement:
    """Least load among those that have the request's weights, with its siblings, and where its prompt may be cached if that
    costs little. Lives on the loop of `workers`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._fleet = workers.fleet
        self._homes = Homes()
        self._prefixes = Prefixes()
        self._beginnings = LastBeginnings()

    def __len__(self) -> int:
        """Groups of siblings that live."""
        return len(self._homes)

    def begin(self, flight: Flight) -> None:
        """Before its first attempt; `end` must follow."""
        self._homes.enter(flight.request.fork_group)
        flight.beginnings = self._beginnings.of(flight.request.prompt_token_ids, flight.request.cache_salt)

    def end(self, flight: Flight) -> None:
        """The request is over, whatever became of it."""
        self.leave(flight)
        self._homes.leave(flight.request.fork_group)

    def place(self, flight: Flight, now_s: float) -> bool:
        """Send the attempt to a worker; False when nobody can take it: `lacks` says why."""
        home, tried = self._homes.of(flight.request.fork_group), flight.setbacks.tried
        lengths = {
            "wanted_tokens": flight.most_tokens,
            "num_tokens": flight.least_tokens,
            "prefill_tokens": flight.prefill_tokens,
        }
        near = self._prefixes.find(flight.beginnings)
        kin = near.news or beginning(flight.request.prompt_token_ids)
        entry = self._fleet.choose(self.weights(flight), now_s, **lengths, but_not=tried, home=home, near=near, kin=kin)
        if entry is None:
            return False
        num_asked = self._fleet.count_usable(self._next_weights(flight), flight.least_tokens, flight.prefill_tokens)
        self._homes.settle(flight.request.fork_group, entry.member.address, entry.member.fingerprint)
        self._submit(flight, entry, near, kin, num_asked)
        self._prefixes.note(flight.beginnings, entry.key, flight.prefill.entry.cache if flight.prefill else None)
        return True

    def weights(self, flight: Flight) -> str | None:
        """Those that answered this request or one of its siblings so far; None = any will do."""
        return flight.fingerprint or self._homes.spoken_fingerprint(flight.request.fork_group)

    def lacks(self, flight: Flight) -> str:
        """What there is none of that the attempt needs."""
        return self._fleet.lacks(self.weights(flight), flight.least_tokens, flight.prefill_tokens)

    def is_tried_everywhere(self, flight: Flight, now_s: float) -> bool:
        """Nobody is left in this round of attempts."""
        fingerprint, tried = self._next_weights(flight), flight.setbacks.tried
        least, prefill = flight.least_tokens, flight.prefill_tokens
        best = self._fleet.choose(fingerprint, now_s, num_tokens=least, prefill_tokens=prefill, but_not=tried)
        return best is None or best.member.address in tried

    def may_speak(self, flight: Flight, output: Output) -> bool:
        """False when this would be the first of a choice whose siblings have moved to other weights."""
        first = flight.is_untouched and bool(output.token_ids or output.prompt_logprobs)
        return not first or flight.fingerprint is None or self._homes.speak(flight.request.fork_group, flight.fingerprint)

    def heard(self, flight: Flight, output: Output) -> None:
        """With its first token it has left its prefill worker."""
        if output.token_ids:
            if output.provenance is not None:
                self._tell_cache(flight, output.provenance)
            self._leave_prefill(flight)

    def leave(self, flight: Flight) -> None:
        """A flight's one release path: off its worker, off every count. Idempotent."""
        self._leave_prefill(flight)
        if flight.entry is not None:
            flight.entry.pending -= 1
            self._workers.cancel(flight.entry, flight.request.request_id, flight.attempt, enough=flight.enough)
            flight.entry = None

    def _next_weights(self, flight: Flight) -> str | None:
        """Those of an attempt after this one, should it bring nothing; None = any will do."""
        fingerprint = None if flight.is_untouched else flight.fingerprint
        return fingerprint or self._homes.spoken_fingerprint(flight.request.fork_group)

    def _submit(self, flight: Flight, entry: Entry, near: Near, kin: bytes, num_asked: int) -> None:
        flight.entry = entry
        flight.fingerprint = entry.member.fingerprint
        entry.pending += 1
        peers: list[Entry] = []
        if entry.member.role is Role.DECODE:
            peers = self._fleet.prefill_peers(flight.fingerprint, flight.prefill_tokens, near, kin)
            if peers:
                flight.prefill = book(peers[0], flight.prefill_tokens, near)
        named = tuple(peer.member.address for peer in peers)
        self._workers.submit(entry, flight.attempt_request(named, entry.member.max_model_len, num_asked))

    def _leave_prefill(self, flight: Flight) -> None:
        if flight.prefill is not None:
            flight.prefill.end()
            flight.prefill = None

    def _tell_cache(self, flight: Flight, provenance: Provenance) -> None:
        """What its prefill worker found in its cache, where that is known: what is computed in any case tells nothing of it,
        nor what came while the worker may still have computed what it shares with another. What was lost, it has again."""
        booking = flight.prefill
        if booking is None or flight.entry is None:
            return
        if not booking.tells_cache or flight.request.sampling.prompt_logprobs is not None:
            return
        peer = booking.entry
        num_found = booking.num_tokens - 1 - provenance.prefilled_tokens - provenance.borrowed_tokens
        is_known = provenance.prefill_worker == peer.member.worker and num_found >= 0  # else another one, or computed twice
        if is_known and peer.cache.tell(booking.num_cached, num_found):
            self._prefixes.note(flight.beginnings, flight.entry.key, peer.cache)


def beginning(prompt_token_ids: tuple[int, ...]) -> bytes:
    """The same for prompts that begin alike; 64 bytes, the longest key of BLAKE2b."""
    return hashlib.blake2b(array("q", prompt_token_ids[:KIN_TOKENS]).tobytes()).digest()
