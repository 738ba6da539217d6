"""A fleet of workers as one TokenEngine: place, stream, and replay on another worker when one fails.

    generate(request) -> place: least loaded D + ordered P list -> Submit on D's Run stream -> outputs to the client
         ^                                                                   |
         +--- attempt + 1, generated_token_ids = everything delivered  <---  D died, fell silent, or gave the request back

What was delivered is never repeated and nothing is lost: the next worker continues behind the last delivered token, and
outputs of an older attempt are dropped by its number. Brakes: `recovery`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from jdisagg.api.channels import INSECURE, Credentials
from jdisagg.api.generation.attempts import Attempts
from jdisagg.api.generation.token_engine import Enough, Health
from jdisagg.api.tasks import until_set
from jdisagg.api.turns import Turns
from jdisagg.core.config import TransferConfig
from jdisagg.core.drill import Drill
from jdisagg.core.errors import DeadlineExceeded, HandoffLost, InvalidRequest, Overloaded, RequestError, Unavailable
from jdisagg.core.fleet import ModelCard
from jdisagg.core.looks import Looks
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.core.timeline import Timeline
from jdisagg.router.drill import with_late_outputs
from jdisagg.router.entrance import Entrance
from jdisagg.router.entry import Entry
from jdisagg.router.fleet_gauges import show_fleet
from jdisagg.router.flight import Flight
from jdisagg.router.placement import Placement
from jdisagg.router.recovery import ReplayConfig, Replays
from jdisagg.router.setbacks import Lost
from jdisagg.router.workers import Workers

log = logging.getLogger(__name__)

DEADLINE_GRACE_S = 1.0  # the worker ends a request at its deadline; this is for one that no longer can
LOOK_S = 0.25  # between two looks of a request that waits for a worker
DRAINING = "the router is draining; use another one"
_RECOVERABLE = (HandoffLost, Unavailable, Overloaded)


class FleetEngine:
    """TokenEngine over everything that registers with `workers`. Lives on one event loop; make it there."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        metrics: Metrics,
        replay: ReplayConfig | None = None,
        credentials: Credentials = INSECURE,
        drill: Drill | None = None,
        slow_request_s: float = inf,
        entrance: Entrance | None = None,
    ) -> None:
        """`slow_request_s`: requests that take longer are logged with their life. `entrance`: which workers may join."""
        self.workers = Workers(
            config=config,
            on_outputs=with_late_outputs(self._on_outputs, drill or Drill()),
            on_lost=self._on_lost,
            on_back=self._on_back,
            metrics=metrics.fleet,
            credentials=credentials,
            entrance=entrance or Entrance(),
        )
        self._metrics = metrics
        show_fleet(self.workers.fleet, metrics.fleet)
        for state in ("running", "waiting"):
            metrics.requests.live.labels(state=state).set_function(partial(self._count, running=state == "running"))
        self._card: ModelCard | None = None  # the last one that workers showed
        self._slow_request_s = slow_request_s
        self._flights: dict[str, Flight] = {}
        self._attempts = Attempts()
        self._turns = Turns()
        self._placement = Placement(self.workers)
        self._replays = Replays(replay or ReplayConfig(), metrics, worker_wait_s=config.worker_wait_s)
        self._draining = False
        self._closed = asyncio.Event()

    # --- TokenEngine

    @property
    def card(self) -> ModelCard:
        """The model of the fleet, as it is where the longest requests fit that are taken now or will be in a moment; of one
        whose decode workers are all away, as it was. Raises Unavailable when none has registered."""
        if (member := self.workers.fleet.longest(monotonic())) is not None:
            self._card = replace(member.card, name=self.workers.entrance.model or member.card.name)
        if self._card is None:
            nobody = (
                "no worker that decodes has registered with this router yet; they do when ready, with --router pointing here"
            )
            raise Unavailable(DRAINING if self._draining else self._with_turned_away(nobody))
        return self._card

    async def first_card(self, deadline_s: float) -> ModelCard:
        """`card`; where none has registered yet, as right after a restart of this router, waits for one, as long as a new
        request waits for a worker. Raises Unavailable."""
        looks = Looks()
        while self._card is None and self.workers.fleet.longest(now_s := monotonic()) is None and not self._draining:
            left_s = min(deadline_s - now_s, self._replays.place_wait_s - looks.awake_s(now_s))
            if left_s <= 0:
                break
            await self.workers.changed(min(LOOK_S, left_s))
        return self.card

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        """Yield the request's outputs until one has `finish`; see TokenEngine."""
        timeline = Timeline(self._metrics, request, monotonic(), self._slow_request_s)
        try:
            self._check(request)
        except RequestError as error:
            timeline.failed(error, monotonic())
            raise
        flight = Flight(self._attempts.behind(request))
        timeline.record.ends_with(flight.whereabouts)
        late = self._tell_when_late(flight)
        self._flights[request.request_id] = flight
        try:
            self._placement.begin(flight)
            await self._place(flight)  # raises: not admitted at all
            timeline.record.scheduled(monotonic())
            while not flight.finished:
                output = await self._next(flight)
                if output is not None:
                    timeline.delivered(output, monotonic())
                    yield output
        except RequestError as error:
            flight.finished = True
            timeline.failed(error, monotonic())
            raise
        except Enough:
            flight.enough = True
            raise
        except Exception as error:  # a bug of ours: no client went away
            flight.finished = True
            timeline.broken(error, monotonic())
            raise
        finally:
            late.cancel()
            if not flight.finished:
                (timeline.stopped if flight.enough else timeline.aborted)(monotonic())
            self._attempts.left(request.request_id, flight.attempt)
            del self._flights[request.request_id]
            self._placement.leave(flight)

    def _check(self, request: EngineRequest) -> None:
        if self._draining:
            raise Unavailable(DRAINING)
        if request.request_id in self._flights:
            raise InvalidRequest(f"request_id {request.request_id} is in use; ids must be unique among live requests")
        self._replays.admit(request, monotonic())

    def health(self) -> Health:
        """Ready while some worker can take a request."""
        if self._draining:
            return Health(reason="draining")
        if lacks := self.workers.fleet.usable(None).lacks:
            return Health(reason=self._with_turned_away(lacks))
        return Health()

    def _with_turned_away(self, reason: str) -> str:
        """Why nobody serves, and who would, were it of this model."""
        return "; ".join(filter(None, (reason, self.workers.entrance.lately(monotonic()))))

    def _count(self, *, running: bool) -> int:
        """Requests that a worker has, or those that wait for one."""
        return sum((flight.entry is not None) == running for flight in self._flights.values())

    async def debug_state(self) -> dict[str, Any]:
        """Members and flights."""
        flights = [flight.summary() for flight in self._flights.values()]
        quarantined = self._replays.num_quarantined(monotonic())
        return {"members": self.workers.snapshot(), "flights": flights, "quarantined": quarantined}

    async def drain(self, deadline_s: float) -> int:
        """Admit nothing more and wait for what runs. Returns the number still unfinished at `deadline_s` (monotonic)."""
        if not self._draining:
            left_s = max(0.0, deadline_s - monotonic())
            log.info("draining: nothing more is admitted, %d requests are waited for %.3g s", len(self._flights), left_s)
        self._draining = True
        self.workers.leave()
        while self._flights and monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        return len(self._flights)

    async def close(self) -> None:
        """Close every stream; requests that still run end with an error."""
        self._draining = True
        self._closed.set()
        for flight in self._flights.values():
            flight.events.put(Lost(_shutting_down(flight), death=False))
        await self.workers.close()

    # --- one request

    async def _place(self, flight: Flight) -> None:
        """Send the attempt to a worker, waiting for one if there is none. Raises Unavailable or DeadlineExceeded."""
        looks = Looks()  # while this router stands still, workers that register are not read
        while True:
            await self._turns.wait()  # a worker that is lost, or comes, concerns all of its requests at once
            if self._closed.is_set():
                raise _shutting_down(flight)
            now_s = monotonic()
            late = now_s >= flight.request.deadline_s
            if not late and self._placement.place(flight, now_s):
                return
            self._placement.check_length(flight, now_s)
            weights, lacks = self._placement.weights(flight), self._placement.lacks(flight)
            self._replays.wait(flight, lacks, now_s - looks.awake_s(now_s), now_s, weights=weights, late=late)
            await self.workers.changed(min(LOOK_S, flight.request.deadline_s - now_s))

    async def _next(self, flight: Flight) -> Output | None:
        """The next thing to tell the client; None after an attempt was replaced by another."""
        event = await flight.events.get()
        if isinstance(event, RequestError):
            return flight.failed(event)
        if isinstance(event, Output):
            if wrong := flight.objection(event):
                event = Lost(HandoffLost(wrong), death=False)
            elif not self._placement.may_speak(flight, event):
                event = Lost(Unavailable("other choices of this request are answered by other weights"), death=False)
            else:
                self._placement.heard(flight, event)
                self._replays.heard(flight, event, monotonic())
                return flight.accept(event)
        try:
            return await self._recover(flight, event)
        except RequestError as error:  # an answer: frames that it has passed lead to whoever asked, and hold it
            return flight.failed(error.with_traceback(None))

    def _tell_when_late(self, flight: Flight) -> asyncio.TimerHandle:
        """One timer for the whole request; one for each of its tokens costs as much as the token."""
        late_s = max(0.0, flight.request.deadline_s - monotonic()) + DEADLINE_GRACE_S
        error = DeadlineExceeded(f"request {flight.request.request_id}: no answer within its deadline")
        return asyncio.get_running_loop().call_later(late_s, flight.events.put, error)

    async def _recover(self, flight: Flight, lost: Lost) -> Output | None:
        """Start the next attempt, or end the request; raises the error that ends it."""
        assert flight.entry is not None  # events come from a worker, one per attempt
        failed, now_s, num_live = flight.entry.member, monotonic(), len(self._flights)
        self._placement.leave(flight)
        if (complete := flight.complete()) is not None:
            return complete
        if self._closed.is_set():
            raise _shutting_down(flight)
        flight.setbacks.tried |= {failed.address}
        alone = self._placement.is_tried_everywhere(flight)
        pause_s = self._replays.next_attempt(flight, lost, worker=failed.worker, alone=alone, num_live=num_live, now_s=now_s)
        if alone:
            flight.setbacks.tried = frozenset({failed.address})  # begin another round
        await until_set(self._closed, min(pause_s, flight.request.deadline_s - now_s))
        await self._place(flight)
        return None

    # --- what the workers bring

    def _on_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            flight = self._flights.get(output.request_id)
            if flight is not None and flight.attempt == output.attempt and flight.entry is not None:
                flight.hear(Lost.told(output.error) if isinstance(output.error, _RECOVERABLE) else output)

    def _on_lost(self, entry: Entry, reason: str) -> None:
        lost = Lost.of(entry, reason)
        for flight in self._flights.values():
            if flight.entry is entry:
                flight.hear(lost)

    def _on_back(self, entry: Entry) -> None:
        for flight in self._flights.values():
            flight.setbacks.is_back(entry.key)


def _shutting_down(flight: Flight) -> Unavailable:
    advice = "send the request again, to another router"
    return Unavailable(f"request {flight.request.request_id}: the router is shutting down; {advice}")
