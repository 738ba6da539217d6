"""Requests on workers: who gets the next attempt of one, what is counted for it there, and how it leaves."""

from __future__ import annotations

import hashlib
import logging
from array import array
from weakref import WeakValueDictionary

from jdisagg.core.errors import ContextLengthExceeded
from jdisagg.core.logs import Seldom
from jdisagg.core.requests import FinishReason, Output, Provenance, Role
from jdisagg.router.booking import Booking, book
from jdisagg.router.entry import Entry
from jdisagg.router.flight import Flight
from jdisagg.router.homes import Home
from jdisagg.router.prefixes import Near, Prefixes, beginnings_of
from jdisagg.router.setbacks import MOST_ASKED
from jdisagg.router.usable import Needs, Wishes
from jdisagg.router.workers import Workers

log = logging.getLogger(__name__)

LENGTH_EVERY_S = 60.0  # between lines that tell of prompts that nobody holds: clients can send any number
KIN_TOKENS = 32  # of a prompt too short to be remembered


class Placement:
    """Least load among those that have the request's weights, with its siblings, and where its prompt may be cached if that
    costs little. Lives on the loop of `workers`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._fleet = workers.fleet
        self._homes = WeakValueDictionary[str, Home]()  # by fork group, for as long as a choice of it lives
        self._prefixes = Prefixes()
        self._told_length = Seldom(LENGTH_EVERY_S)

    def begin(self, flight: Flight) -> None:
        """Before its first attempt; `leave` must follow."""
        group = flight.request.fork_group
        flight.home = home = self._homes.setdefault(group, Home()) if group else Home()
        # once for all choices of a prompt: of a long one it takes 2 ms, in which the event loop does nothing else
        home.beginnings = home.beginnings or beginnings_of(flight.request.prompt_token_ids, flight.request.cache_salt)

    def place(self, flight: Flight, now_s: float) -> bool:
        """Send the attempt to a worker; False when nobody can take it: `lacks` says why."""
        home = flight.home.address if flight.request.fork_group else ""  # one that is alone follows nobody
        tried = flight.setbacks.tried
        near = self._prefixes.find(flight.home.beginnings)
        kin = near.news or beginning(flight.request.prompt_token_ids)
        wishes = Wishes(but_not=tried, num_tokens=flight.most_tokens, home=home, near=near, bits=flight.bits, kin=kin)
        entry = self._fleet.choose(self.weights(flight), now_s, _needs(flight), wishes)
        if entry is None:
            return False
        num_asked = min(len(self._fleet.usable(self._next_weights(flight), _needs(flight)).entries), MOST_ASKED)
        flight.home.settle(entry.member.address, entry.member.card.answers)
        self._submit(flight, entry, near, kin, num_asked)
        self._prefixes.note(flight.home.beginnings, entry.key, flight.prefill.cache if flight.prefill else None)
        return True

    def weights(self, flight: Flight) -> str | None:
        """Those that answered this request or one of its siblings so far; None = any will do."""
        return flight.answers or flight.home.spoken_answers

    def lacks(self, flight: Flight) -> str:
        """What there is none of that the attempt needs."""
        return self._fleet.usable(self.weights(flight), _needs(flight)).lacks

    def check_length(self, flight: Flight, now_s: float) -> None:
        """Raises ContextLengthExceeded for a new prompt that nobody holds who computed prompts of late: there is nobody to wait
        for."""
        needed, most = flight.prefill_tokens, self._fleet.most_prefill_tokens(now_s)
        if not flight.is_untouched or most is None or needed <= most:
            return
        if self._fleet.usable(self.weights(flight), _needs(flight)).is_too_long:
            text = (
                f"request {flight.request.request_id}: a prompt may have at most {most - 1} tokens, but this one has "
                f"{needed - 1}: no worker that computes prompts holds more than {most} (--max-model-len, or its KV pool), and "
                "decode workers must not compute any (--local-prefill never)"
            )
            self._told_length.say(log, logging.WARNING, "%s", text, now_s=now_s)
            raise ContextLengthExceeded(f"{text}; shorten the prompt", field="prompt")

    def is_tried_everywhere(self, flight: Flight) -> bool:
        """Nobody is left in this round of attempts."""
        there = self._fleet.usable(self._next_weights(flight), _needs(flight)).entries
        return all(entry.member.address in flight.setbacks.tried for entry in there)

    def may_speak(self, flight: Flight, output: Output) -> bool:
        """False when this would be the first of a choice whose siblings have moved to other weights."""
        first = flight.is_untouched and bool(output.token_ids or output.prompt_logprobs)
        return not first or flight.answers is None or flight.home.speak(flight.answers)

    def heard(self, flight: Flight, output: Output) -> None:
        """With its first token it has left its prefill worker. Which one that was comes with it, too, or else, where there was
        none, at the end; one that fails without having been computed names none."""
        provenance, is_failed = output.provenance, output.finish in (FinishReason.ERROR, FinishReason.ABORT)
        if provenance is not None and (output.token_ids or (provenance.prefill_worker if is_failed else output.finish)):
            self._tell_caches(flight, provenance)
        if output.token_ids:
            self._leave_prefill(flight)

    def leave(self, flight: Flight) -> None:
        """A flight's one release path: off its worker, off every count. Idempotent."""
        if flight.prefill is not None and flight.unproven is not None:  # given up before its first token
            self._forget(flight, flight.unproven)  # what was computed by then has pushed out others, and stays counted
        self._leave_prefill(flight)
        flight.unproven = None
        if flight.entry is not None:
            flight.entry.pending -= 1
            self._workers.cancel(flight.entry, flight.request.request_id, flight.attempt, enough=flight.enough)
            flight.entry = None

    def _next_weights(self, flight: Flight) -> str | None:
        """Those of an attempt after this one, should it bring nothing; None = any will do."""
        answers = None if flight.is_untouched else flight.answers
        return answers or flight.home.spoken_answers

    def _submit(self, flight: Flight, entry: Entry, near: Near, kin: bytes, num_asked: int) -> None:
        flight.entry = entry
        card = flight.card = entry.member.card
        flight.bits = flight.bits or entry.member.bits
        entry.pending += 1
        peers: list[Entry] = []
        if entry.member.role is Role.DECODE:
            peers = self._fleet.prefill_peers(card.fingerprint, _needs(flight), near, kin, bits=entry.member.bits)
            if peers:
                flight.prefill = flight.unproven = book(peers[0], flight.prefill_tokens, near)
        named = tuple(peer.member.address for peer in peers)
        self._workers.submit(entry, flight.attempt_request(named, card.max_model_len, num_asked))

    def _leave_prefill(self, flight: Flight) -> None:
        if flight.prefill is not None:
            flight.prefill.end()
            flight.prefill = None

    def _tell_caches(self, flight: Flight, provenance: Provenance) -> None:
        """Which prefill worker has the prompt now, once."""
        booking, flight.unproven = flight.unproven, None
        if booking is None:
            return
        computed_by = provenance.prefill_worker
        if computed_by == booking.entry.member.worker:
            self._tell_found(flight, booking, provenance)
            return
        other = self._fleet.prefill_named(computed_by)
        if other is None and (computed_by or not provenance.decode_worker):
            return  # one that is gone, or too old to give its name: else the decode worker itself
        booking.take_back()
        self._forget(flight, booking)
        if other is not None and flight.entry is not None:
            num_computed = provenance.prefilled_tokens + provenance.borrowed_tokens
            other.cache.written += min(num_computed, booking.num_tokens)  # whatever it says: others reckon with it
            self._prefixes.note(flight.home.beginnings, flight.entry.key, other.cache)

    def _forget(self, flight: Flight, booking: Booking) -> None:
        """Who was asked has no more of it than before; unless it was asked for it again since then."""
        self._prefixes.forget(flight.home.beginnings, booking.cache, booking.written, but=booking.num_cached)

    def _tell_found(self, flight: Flight, booking: Booking, provenance: Provenance) -> None:
        """What the one that was asked found in its cache. What is computed in any case tells nothing of that, nor what came
        while the worker may still have computed what it shares with another. What was lost, it has again."""
        if flight.entry is None or not booking.tells_cache or flight.request.sampling.prompt_logprobs is not None:
            return
        num_found = booking.num_tokens - 1 - provenance.prefilled_tokens - provenance.borrowed_tokens
        if num_found >= 0 and booking.cache.tell(booking.num_cached, num_found):  # else it was computed twice
            self._prefixes.note(flight.home.beginnings, flight.entry.key, booking.cache)


def _needs(flight: Flight) -> Needs:
    """What a worker must be able to."""
    grammar = flight.request.grammar_kind
    return Needs(num_tokens=flight.least_tokens, prefill_tokens=flight.prefill_tokens, grammar=grammar)


def beginning(prompt_token_ids: tuple[int, ...]) -> bytes:
    """The same for prompts that begin alike; 64 bytes, the longest key of BLAKE2b."""
    return hashlib.blake2b(array("q", prompt_token_ids[:KIN_TOKENS]).tobytes()).digest()
