"""A worker's own engine as a TokenEngine: the bridge between the event loop of the edges and the engine thread.

Down: `Inbox.post` (thread-safe, never blocks). Up: the engine calls one sink per tick; the sink crosses to the loop once and
hands each request its outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from jdisagg.api.generation.attempts import Attempts
from jdisagg.api.generation.gathered import gathered_by, in_one
from jdisagg.api.generation.token_engine import Enough, Health
from jdisagg.api.mailbox import Mailbox
from jdisagg.api.tasks import call_on, first_of
from jdisagg.core.errors import Cancelled, DeadlineExceeded, RequestError, Unavailable
from jdisagg.core.fleet import Load, ModelCard
from jdisagg.core.requests import EngineRequest, Grammar, Output
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.inbox import Cancel, Submit
from jdisagg.roles.ports import OutputSink
from jdisagg.text.grammar import Compiled, Grammars

DEADLINE_GRACE_S = 5.0  # the engine itself ends a request at its deadline; this is for an engine that no longer can
OWN = "own edge"  # the front end that is no router; a router that says no name has the empty one
LOOK_S = 0.1  # a drain of no length waits so long to know what runs
ANSWER_TIMEOUT_S = 2.0  # for a question to the engine thread, asked between two ticks

Answer = TypeVar("Answer")


class LocalEngine:
    """TokenEngine over one EngineThread. Use from one event loop."""

    def __init__(
        self,
        thread: EngineThread,
        card: ModelCard,
        *,
        not_ready_reason: Callable[[], str],
        helpers: Sequence[EngineThread] = (),
        grammars: Grammars | None = None,
    ) -> None:
        """`helpers`: engines of this process that `thread` cannot do without; `grammars`: the engine's."""
        self._thread = thread
        self._grammars = grammars
        self._helpers = helpers
        self.card = card
        self._not_ready_reason = not_ready_reason
        self._loop = asyncio.get_running_loop()
        self._mailboxes: dict[tuple[str, int], Mailbox[Output | RequestError]] = {}  # by request id and attempt
        self._attempts = Attempts()
        self._draining = False
        self._sink = partial(call_on, self._loop, self._deliver)  # one object: the engine groups a tick's outputs by sink

    async def first_card(self, deadline_s: float) -> ModelCard:
        """`card`, at once."""
        return self.card

    # --- for WorkerService: requests that come as tokens from a router

    def submit(self, request: EngineRequest, sink: OutputSink, front_end: str = "") -> None:
        """Run it for `front_end`; `sink` is called from the engine thread, once per tick."""
        self._thread.loop.inbox.post(Submit(request, sink, front_end))

    def cancel(self, request_id: str, attempt: int, sink: OutputSink, *, enough: bool = False) -> None:
        """Forget what was submitted with `sink`; unknown ids and other attempts are ignored. `enough`: see Cancel."""
        self._thread.loop.inbox.post(Cancel(request_id, attempt, sink, enough))

    @property
    def ticks(self) -> int:
        """Finished engine ticks, which heartbeats carry."""
        return self._thread.ticks

    @property
    def is_over(self) -> bool:
        """The engine has raised, and its process is about to end."""
        return self._thread.is_over

    @property
    def load(self) -> Load:
        """How busy the engine is, as of its last tick."""
        return self._thread.loop.load

    # --- for the edges

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        """Yield the request's outputs; closing the generator cancels it. See TokenEngine."""
        grammar = request.sampling.grammar
        _held = None if grammar is None or self._grammars is None else await self._compiled(request, grammar, self._grammars)
        mailbox = Mailbox[Output | RequestError](wake_at=gathered_by(len(self._mailboxes)) if request.gathered else 1)
        request = self._attempts.behind(request)
        key = request.request_id, request.attempt
        self._mailboxes[key] = mailbox
        finished = enough = False
        late_s = max(0.0, request.deadline_s - monotonic()) + DEADLINE_GRACE_S
        late = DeadlineExceeded(f"request {request.request_id}: no answer from the engine within its deadline")
        timer = self._loop.call_later(late_s, mailbox.put, late)
        self._thread.loop.inbox.post(Submit(request, self._sink, OWN))
        try:
            while not finished:
                output = in_one(await mailbox.take()) if request.gathered else await mailbox.get()
                if isinstance(output, RequestError):
                    raise output
                finished = output.finish is not None
                yield output
        except Enough:
            enough = True
            raise
        except asyncio.CancelledError:  # the answer to an abort has what was gathered before it
            finished = True
            self._leave(key)  # first: the engine shall not wait for whoever reads it
            if request.gathered and (gathered := mailbox.taken()) and isinstance(last := in_one(gathered), Output):
                yield last
            raise
        finally:
            timer.cancel()
            if self._mailboxes.get(key) is mailbox:
                del self._mailboxes[key]
            if not finished:
                self._leave(key, enough=enough)

    async def _compiled(self, request: EngineRequest, grammar: Grammar, grammars: Grammars) -> Compiled:
        """Before the engine has the request, which counts only those it had."""
        try:
            return await grammars.ahead(grammar)
        except RequestError as error:
            self._thread.loop.metrics.requests.finished.labels(reason=error.reason).inc()
            raise
        except asyncio.CancelledError:
            ended_by = DeadlineExceeded if monotonic() >= request.deadline_s else Cancelled
            self._thread.loop.metrics.requests.finished.labels(reason=ended_by.reason).inc()
            raise

    def _leave(self, key: tuple[str, int], *, enough: bool = False) -> None:
        """Have the engine forget a request that it may still run."""
        self._attempts.left(*key)
        self.cancel(*key, self._sink, enough=enough)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (mailbox := self._mailboxes.get((output.request_id, output.attempt))) is not None:
                mailbox.put(output, at_once=output.finish is not None)

    def health(self) -> Health:
        """Healthy while ticks end; ready when the role's own conditions hold as well."""
        for thread in (self._thread, *self._helpers):
            if reason := thread.unhealthy_reason(monotonic()):
                return Health(healthy=False, reason=reason)
        return Health(reason="draining" if self._draining else self._not_ready_reason())

    async def debug_state(self) -> dict[str, Any]:
        """The engine's snapshot, with those of its helpers if it has any."""
        own, *helpers = await asyncio.gather(*(_state_of(thread) for thread in (self._thread, *self._helpers)))
        return {**own, "helpers": helpers} if helpers else own

    async def drain(self, deadline_s: float) -> int:
        """Admit nothing more; wait for what runs, for what was posted before, and until clients have the last of it. Returns
        the number still unfinished at `deadline_s`, at least 1 when the engine has not even looked."""
        self._draining = True
        begun = self._thread.loop.inbox.call(self._thread.loop.start_draining)  # behind requests that it has not looked at
        look_until_s = monotonic() + LOOK_S
        while not begun.done() and monotonic() < look_until_s:
            await asyncio.sleep(0.005)
        loop = self._thread.loop
        while (loop.num_unfinished or not begun.done() or self._mailboxes) and monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        return loop.num_unfinished or int(not begun.done()) or len(self._mailboxes)

    def close(self) -> None:
        """Requests of its own edges that still run end with an error; those of a router end with its stream."""
        for (request_id, _), mailbox in self._mailboxes.items():
            advice = "send the request again, to another worker"
            mailbox.put(Unavailable(f"request {request_id}: this worker is shutting down; {advice}"))


async def _state_of(thread: EngineThread) -> dict[str, Any]:
    """Taken between two ticks; says so when the engine does not turn over."""
    try:
        return await ask(thread, thread.loop.snapshot)
    except Unavailable as error:
        return {"error": error.message, "in_flight": thread.loop.in_flight_text()}


async def ask(thread: EngineThread, function: Callable[[], Answer]) -> Answer:
    """Run `function` on an engine's thread between two ticks. Raises Unavailable when it does not turn over."""
    answer = asyncio.wrap_future(thread.loop.inbox.call(function))
    try:
        await first_of(answer, timeout_s=ANSWER_TIMEOUT_S)
        if answer.done():
            return answer.result()
    finally:
        answer.cancel()
    raise Unavailable(f"the engine thread has not answered within {ANSWER_TIMEOUT_S:g} s; see /health")
