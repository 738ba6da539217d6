"""Whether a request that lost its worker gets another attempt: counted and logged, whatever the answer.

Three brakes: a request in flight at two deaths is failed and quarantined (a worker that only fell silent counts half, one that
is back not at all), one that workers keep giving back is failed with their reason, and all replays share a budget.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from dataclasses import dataclass

from jdisagg.core.errors import DeadlineExceeded, Overloaded, Quarantined, RequestError, Unavailable
from jdisagg.core.logs import Seldom
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.router.flight import Flight
from jdisagg.router.setbacks import Lost

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # before the same worker is asked again
WINDOW_S = 60.0  # of the replay budget
FAILED_EVERY_S, FAILED_FIRST = 10.0, 16  # while no worker takes any, every request fails


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How much recovery a router affords."""

    max_deaths: int = 2  # a request in flight at so many deaths (or twice as many silences) is failed and refused for a while
    max_refusals: int = 8  # replays after a worker gave the request back: see `Setbacks`
    quarantine_s: float = 60.0
    budget_share: float = 0.5  # replays per new request ..
    budget_floor: int = 64  # .. and this many a minute, beside everything alive once: see `ReplayBudget`
    place_wait_s: float = 5.0  # how long a new request waits for a worker; a replay, whose client holds a stream, longer


class Replays:
    """The brakes of one router. Lost at its restart: a new router knows of no deaths."""

    def __init__(self, config: ReplayConfig, metrics: Metrics, *, worker_wait_s: float) -> None:
        """`worker_wait_s`: the longest that a request waits for a worker to appear."""
        self._config = config
        self._worker_wait_s = worker_wait_s
        self._metrics = metrics
        self._quarantine = Quarantine(config.quarantine_s)
        self._budget = ReplayBudget(config.budget_share, config.budget_floor)
        self._told_failed = {level: Seldom(FAILED_EVERY_S, FAILED_FIRST) for level in (logging.INFO, logging.WARNING)}

    def num_quarantined(self, now_s: float) -> int:
        """Keys under quarantine."""
        self._quarantine.expire(now_s)
        return len(self._quarantine)

    @property
    def place_wait_s(self) -> float:
        """The longest that a new request waits for a worker."""
        return min(self._worker_wait_s, self._config.place_wait_s)

    def admit(self, request: EngineRequest, now_s: float) -> None:
        """A new request. Raises Quarantined while it is quarantined."""
        self._quarantine.check(request, now_s)
        self._budget.admitted()

    def next_attempt(self, flight: Flight, lost: Lost, *, worker: str, alone: bool, num_live: int, now_s: float) -> float:
        """Begin the next attempt of `flight`; returns the seconds to wait before it is placed. `alone`: every worker there is
        has failed it. Raises the error that ends the request."""
        stage = _stage(flight)
        where = f", worker {worker}" if worker and worker not in lost.error.message else ""
        is_full = isinstance(lost.error, Overloaded)
        passes_on = is_full and flight.is_untouched  # nothing was lost, and a busy fleet refuses many: overload, not recovery
        level = logging.DEBUG if passes_on else logging.INFO if is_full else logging.WARNING
        told = (flight.request.request_id, stage, where, lost.error.message)
        flight.setbacks.add(lost, worker, now_s, is_full=passes_on, alone=alone)
        try:
            self._check(flight, lost, num_live=num_live, now_s=now_s)
        except RequestError as verdict:
            why = verdict.message.removeprefix(f"request {flight.request.request_id}: ")  # and what it was lost to
            log.log(level, "request %s: not replayed; stage %s%s: %s", *told[:3], why)
            raise
        if not passes_on:
            flight.setbacks.replays += 1
            self._metrics.fleet.recoveries.labels(rung="replay").inc()
        log.log(level, "request %s: recovering by replay; stage %s%s: %s; attempt %d", *told, flight.attempt + 1)
        flight.replay()
        again = not lost.death and (alone or (passes_on and flight.setbacks.has_asked_all))
        return min(FIRST_PAUSE_S * 2**flight.setbacks.refusals, LONGEST_PAUSE_S) if again else 0.0

    def wait(self, flight: Flight, lacks: str, began_s: float, now_s: float, *, weights: str | None, late: bool) -> None:
        """There is no worker of those `weights` (None = any) for the attempt, as `lacks` says, or its deadline has passed.
        Raises, and logs, the error that ends the request when it has waited long enough, since `began_s`, of which time in
        which this process stood still is no part. `lacks` is empty for one that came too late to be placed."""
        request_id, longest_s, waited_s = flight.request.request_id, self._worker_wait_s, now_s - began_s
        if flight.attempt == flight.request.attempt:
            longest_s = self.place_wait_s
        if not late and waited_s < longest_s:
            return
        missing = f" ({lacks})" if lacks else ""
        taken = "a worker took it"
        if flight.setbacks.last:
            taken, missing = "it could go on", f" ({'; '.join(filter(None, (flight.setbacks.last, lacks)))})"
        error: RequestError = DeadlineExceeded(f"request {request_id}: its deadline passed before {taken}{missing}")
        if not late:
            wanted = f" of fingerprint {weights}" if weights else ""
            hint = f"start one{wanted}, or wait for one that restarts"
            error = Unavailable(f"request {request_id}: {lacks}; waited {longest_s:.0f} s: {hint}")
        told = (request_id, waited_s, _stage(flight), f"its deadline passed{missing}" if late else lacks)
        level = logging.WARNING if lacks else logging.INFO  # a deadline that nobody could keep is its client's
        text = "request %s: failed; it waited %.2f s for a worker, %s: %s"
        self._told_failed[level].say(log, level, text, *told, now_s=now_s)
        raise error

    def heard(self, flight: Flight, output: Output, now_s: float) -> None:
        """A worker sent `output`: says what a recovery that is now over has cost, and why the worker fails it."""
        if not (output.token_ids or output.finish):
            return
        if output.error is not None:
            self._say_failed(flight, output.error, now_s)
        waited_s = flight.setbacks.overcome(now_s)
        if waited_s is not None and output.error is None and flight.entry is not None:
            told = (flight.request.request_id, waited_s, flight.attempt, flight.entry.member.worker)
            log.info("request %s: goes on %.2f s after it was lost; attempt %d, worker %s", *told)

    def _say_failed(self, flight: Flight, error: RequestError, now_s: float) -> None:
        """No other worker is asked. Of what was wrong with the request, or came too late, its client is told alone."""
        if error.http_status != RequestError.http_status or flight.entry is None:
            return
        why = error.message.removeprefix(f"request {flight.request.request_id}: ")
        told = (flight.request.request_id, _stage(flight), flight.entry.member.worker, why)
        text = "request %s: failed; stage %s, worker %s: %s"
        self._told_failed[logging.WARNING].say(log, logging.WARNING, text, *told, now_s=now_s)

    def _check(self, flight: Flight, lost: Lost, *, num_live: int, now_s: float) -> None:
        """Raises the error that ends the request."""
        request_id = flight.request.request_id
        if flight.setbacks.blame >= self._config.max_deaths:
            self._quarantine.add(flight.request, now_s)
            self._metrics.fleet.quarantined.inc()
            raise Quarantined(
                f"request {request_id}: in flight when {flight.setbacks.deaths} workers went down "
                f"(last: {lost.error.message}); not tried again, and it and its prompt are refused here for "
                f"{self._config.quarantine_s:.0f} s"
            )
        error = flight.setbacks.refused(lost.error) if isinstance(lost.error, Overloaded) else lost.error
        was_accepted = flight.setbacks.deaths and flight.is_untouched  # by a worker that is gone; the others get fuller
        is_full = flight.setbacks.has_asked_all and isinstance(error, Overloaded) and not was_accepted
        if is_full or flight.setbacks.refusals > self._config.max_refusals:
            raise error
        refused = not lost.death and flight.is_untouched and isinstance(error, Overloaded | Unavailable)
        if refused or self._budget.take(num_live, now_s):
            return  # a worker that is full or drains did nothing for it: moving on costs nothing
        self._metrics.fleet.replays_refused.inc()
        raise Unavailable(
            f"request {request_id}: {error.message}; not replayed: this router has spent its replay budget of "
            f"{self._config.budget_floor} + {num_live} live requests a minute ({WINDOW_S:.0f} s); "
            "find out why workers die, or raise --replay-budget"
        )


class Quarantine:
    """Requests, by id and by prompt, that are refused for now, as they seem to kill workers."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s: dict[str, float] = {}  # by key, the first to end first

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Refuse it from now on."""
        self.expire(now_s)
        for key in _keys(request):
            self._until_s.pop(key, None)
            self._until_s[key] = now_s + self._seconds

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            del self._until_s[next(iter(self._until_s))]

    def check(self, request: EngineRequest, now_s: float) -> None:
        """Raises Quarantined while it is quarantined."""
        self.expire(now_s)
        left_s = max(self._until_s.get(key, 0.0) for key in _keys(request)) - now_s if self._until_s else 0.0
        if left_s > 0:
            raise Quarantined(
                f"request {request.request_id}: this request or its prompt was in flight when several workers died; "
                f"quarantined for {left_s:.0f} s more"
            )

    def __len__(self) -> int:
        return len(self._until_s)


class ReplayBudget:
    """How many replays a router may start: a fleet that dies over and over must fail clearly, not compute everything many
    times.

    A bucket that fills with replays and leaks. It holds everything that is alive once, plus a floor, so one death never fails
    for lack of budget; it leaks its size per minute, and a share of every new request. Time is passed in.
    """

    def __init__(self, share: float, floor: int) -> None:
        """`share`: replays per new request. `floor`: replays a minute whatever the traffic."""
        self._share = share
        self._floor = floor
        self._spent = 0.0
        self._largest = 0  # it has been since nothing was spent: so what many alive have spent is over in a minute, too
        self._leaked_s = 0.0

    def admitted(self) -> None:
        """A new request came."""
        self._spent = max(0.0, self._spent - self._share)

    def take(self, num_live: int, now_s: float) -> bool:
        """Whether one more replay may start now, with `num_live` requests alive."""
        size = self._floor + num_live
        self._largest = max(size, self._largest)
        self._spent = max(0.0, self._spent - max(0.0, now_s - self._leaked_s) * self._largest / WINDOW_S)
        if not self._spent:
            self._largest = size
        self._leaked_s = max(self._leaked_s, now_s)
        if self._spent + 1.0 > size:
            return False
        self._spent += 1.0
        return True


def _stage(flight: Flight) -> str:
    return f"behind {flight.num_delivered} tokens" if flight.num_delivered else "before its first token"


def _keys(request: EngineRequest) -> tuple[str, str]:
    """Who keeps prefixes apart by a salt keeps prompts apart: nobody learns, or suffers from, what others asked."""
    prompt = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    prompt.update(request.cache_salt.encode())
    return f"id:{request.request_id}", f"prompt:{prompt.hexdigest()}"
