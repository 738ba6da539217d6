"""The edge between text and tokens: a client's request becomes engine requests, their outputs become text deltas.

Everything the engine does for a request ends when the generator of `stream` is closed, whatever the reason: a stop string, a
client that went away, an error in another choice of the same request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TypeVar

from jdisagg.api.generation.choice import ChoiceText, Delta, Kept, Transcript, in_fewer
from jdisagg.api.generation.ends import Ends
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.api.generation.intake import Job, TextRequest, admit
from jdisagg.api.generation.live import Abort, LiveRequests, RequestMailbox
from jdisagg.api.generation.long_texts import LongTexts
from jdisagg.api.generation.token_engine import Enough, TokenEngine
from jdisagg.api.in_order import is_long
from jdisagg.api.turns import Turns
from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, RequestError
from jdisagg.core.fleet import ModelCard
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, FinishReason, SamplingParams
from jdisagg.text.calls.format import ModelFormat
from jdisagg.text.thoughts import ThoughtMarks
from jdisagg.text.tokenizer import Tokenizer

T = TypeVar("T")

_DEADLINE_GRACE_S = 6.0  # the engine ends a request at its deadline; this is for an engine that no longer can
_LOOK_S = 0.05

_log = logging.getLogger(__name__)


class Edge:
    """Text front of one TokenEngine. Use from one event loop."""

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        *,
        default_deadline_s: float = 600.0,
        defaults: SamplingParams = SamplingParams(),
        max_new_tokens: int | None = None,
        draw_seed: Callable[[], int] = partial(random.getrandbits, 32),
        metrics: Metrics | None = None,
        source: str | None = None,
        grammars: GrammarGate | None = None,
        call_format: ModelFormat | None = None,
        thought_marks: ThoughtMarks | None = None,
    ) -> None:
        """`default_deadline_s` runs from arrival. `defaults`: the model's own for parameters a client leaves out,
        `max_new_tokens` for the length of an answer. `metrics`: where requests are counted that no engine sees. `source`: what
        the tokenizer was loaded by, a directory or a Hub id, which benchmarks load theirs by, too. `grammars`: None = the
        tokenizer is none that answers can be constrained for. `call_format`: of tool calls in answers; None = they stay
        text. `thought_marks`: of thoughts; None = they stay content."""
        self._engine = engine
        self.source = source
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.call_format = call_format
        self.thought_marks = thought_marks
        self._max_new_tokens = max_new_tokens
        self._default_deadline_s = default_deadline_s
        self._draw_seed = draw_seed
        self._grammars = grammars
        self.ends = Ends(metrics)
        self._live = LiveRequests()
        self._one_thread = asyncio.Lock()
        self.long_texts = LongTexts()
        self._turns = Turns()

    @property
    def card(self) -> ModelCard:
        """The served model."""
        return self._engine.card

    async def until_read(self, deadline_s: float) -> None:
        """Wait until clients have read their answers. Nothing more should be admitted by now."""
        while (num_unread := self._live.num_streamed) and monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)
        if num_unread:
            _log.warning("answers that clients have not read by the end of --drain-s: %d", num_unread)

    async def admit(self, request: TextRequest) -> Job:
        """Check a request and tokenize it; nothing runs yet. Raises InvalidRequest, ModelNotFound, Overloaded where
        too many long texts wait, Unavailable at a router that no worker registers with within seconds, or DeadlineExceeded."""
        with self._live.admitting(request.request_id) as mailbox:
            job = await self._admit(request)
        return replace(job, is_aborted=True) if mailbox.taken() else job

    def transcript(self, job: Job, keep: Kept = "all") -> Transcript:
        """An empty transcript for the deltas of `job`."""
        return Transcript(len(job.requests), n=job.n, num_prompt_tokens=job.num_prompt_tokens, keep=keep)

    async def stream(self, job: Job) -> AsyncGenerator[Delta]:
        """Run all choices at once and yield their deltas as they come; each choice ends with exactly one `finish`. Deltas for
        which a slow reader did not come in time, it gets a few of in one.

        Raises RequestError when a choice fails; the others are cancelled. Closing the generator frees everything.
        """
        mailbox = self._live.enter(job.request_id)
        if job.is_aborted:
            mailbox.abort()
            self.ends.aborted(len(job.requests))
        mailbox.tasks = [
            asyncio.create_task(self._pump(job, index, mailbox), name=request.request_id)
            for index, request in enumerate(() if job.is_aborted else job.requests)
        ]
        unfinished, items = set(range(len(job.requests))), deque[Delta | Exception | Abort]()
        try:
            while unfinished:
                if not items:
                    items += in_fewer(await mailbox.take())
                item = items.popleft()
                if isinstance(item, InvalidRequest):
                    item = job.named(item)
                if isinstance(item, RequestError):
                    self.ends.has_counted(item)
                if isinstance(item, Exception):
                    try:
                        raise item
                    finally:
                        del item  # else this frame, with the job, and the error's traceback keep each other
                if isinstance(item, Abort):
                    await self._ended(job, mailbox.tasks)  # what they had gathered they put behind it
                    items = _aborted([*items, *mailbox.taken()], unfinished)
                    continue
                if item.finish is not None:
                    unfinished.discard(item.index)
                yield item
        finally:
            try:
                for task in mailbox.tasks:
                    task.cancel()
                await self._ended(job, mailbox.tasks)
            finally:
                mailbox.tasks = ()  # they keep it by their frames, with the job, until all objects are searched for garbage
                del self._live[job.request_id]  # last: a new request of this id must not meet the cancel of the old one

    async def complete(self, job: Job) -> Transcript:
        """Run a request to its end. Raises RequestError when a choice fails."""
        transcript = self.transcript(job)
        if not job.stop:  # each token may complete one, and what is computed behind it is in vain
            job = replace(job, requests=tuple(replace(request, gathered=True) for request in job.requests))
        async with aclosing(self.stream(job)) as deltas:
            async for delta in deltas:
                transcript.add(delta)
        return transcript

    async def with_tokenizer(self, function: Callable[[], T], num_characters: int) -> T:
        """What `function` returns, which takes the tokenizer as long as a text of so many characters does: here, when it is its
        turn, or beside the event loop when that is long. Raises Overloaded where too many long ones wait."""
        await self._turns.wait()
        async with self.long_texts.place(num_characters) as run:
            return await run(function)

    async def read_long(
        self, read: Callable[[], T], num_bytes: int, request_id: str, *, arrived_s: float, timeout_s: float | None
    ) -> T:
        """What `read` makes of so many bytes beside the event loop, or its error. Raises Overloaded where too many long ones
        wait, DeadlineExceeded when `timeout_s` is over, be it that `read` has begun."""
        async with _until(self._deadline_s(arrived_s, timeout_s), request_id), self.long_texts.place(num_bytes) as run:
            return await run(read)

    async def beside(self, function: Callable[[], T]) -> T:
        """What `function`, a long one, returns. It runs beside the event loop, where more than one would only take turns: who
        waits no longer has the next one wait for its thread all the same."""
        await self._one_thread.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(function))
        working.add_done_callback(lambda _: self._one_thread.release())
        return await asyncio.shield(working)

    def abort(self, request_id: str) -> bool:
        """End a request, be it that its prompt is still read: its choices finish with ABORT, behind what was generated by then.
        False when there is no such request."""
        mailbox = self._live.get(request_id)
        if mailbox is None:
            return False
        mailbox.abort()
        return True

    async def _admit(self, request: TextRequest) -> Job:
        arrived_s = monotonic() if request.arrived_s is None else request.arrived_s
        deadline_s = self._deadline_s(arrived_s, request.timeout_s)
        card = await self._engine.first_card(deadline_s)
        await self._turns.wait()
        async with _until(deadline_s, request.request_id):  # grammars and long texts are waited for
            return await admit(
                _with_recommended(request, self._max_new_tokens),
                card,
                self.tokenizer,
                self.long_texts,
                self._grammars,
                arrived_s=arrived_s,
                deadline_s=deadline_s,
                draw_seed=self._draw_seed,
            )

    def _deadline_s(self, arrived_s: float, timeout_s: float | None) -> float:
        return arrived_s + min(self._default_deadline_s if timeout_s is None else timeout_s, self._default_deadline_s)

    async def _pump(self, job: Job, index: int, mailbox: RequestMailbox) -> None:
        """One choice. The mailbox is unbounded (by max_tokens): a slow reader must not hold KV pages."""
        request = job.requests[index]
        try:
            async with asyncio.timeout(max(0.0, job.deadline_s - monotonic()) + _DEADLINE_GRACE_S):
                await self._turns.wait()
                async with aclosing(self._deltas(job, index, request)) as deltas:
                    async for delta in deltas:
                        mailbox.put(delta)
        except TimeoutError:
            mailbox.put(DeadlineExceeded(f"request {request.request_id}: not finished within its deadline"))
        except RequestError as error:  # an answer, and no bug to look for; frames that it has passed hold it
            mailbox.put(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001  # raised again by the reader of the mailbox
            mailbox.put(error)

    async def _deltas(self, job: Job, index: int, request: EngineRequest) -> AsyncGenerator[Delta]:
        choice = ChoiceText(self.tokenizer, job, index)
        async with aclosing(self._engine.generate(request)) as outputs:
            while True:
                try:
                    output = await anext(outputs)
                except StopAsyncIteration:
                    break
                except asyncio.CancelledError:  # the answer to an abort has the text of all its tokens
                    if (rest := choice.rest()) is not None:
                        yield rest
                    raise
                if output.error is not None:
                    raise output.error
                if output.finish is FinishReason.ERROR:
                    raise RequestError(f"request {request.request_id}: the engine failed it without saying why")
                if is_long(output):
                    delta = await self.beside(partial(choice.absorb, output))
                else:
                    delta = choice.absorb(output)
                yield delta
                if delta.finish is not None:
                    if output.finish is None:
                        with suppress(Enough):
                            await outputs.athrow(Enough())
                    return
        raise RequestError(f"request {request.request_id}: the engine's stream ended without a finish reason")

    async def _ended(self, job: Job, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for those that were cancelled: when this returns every engine generator is closed."""
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                self.ends.tell("request %s: its end failed", job.request_id, result)


@asynccontextmanager
async def _until(deadline_s: float, request_id: str) -> AsyncIterator[None]:
    """Ends what waits within it, with DeadlineExceeded."""
    try:
        async with asyncio.timeout(max(0.0, deadline_s - monotonic())):
            yield
    except TimeoutError as error:
        late = f"request {request_id}: its deadline passed before its prompt and its grammar were read"
        raise DeadlineExceeded(late) from error


def _with_recommended(request: TextRequest, max_new_tokens: int | None) -> TextRequest:
    """With the model's own length of answers for one that a client leaves out; where there is a default, the lower one."""
    known = [count for count in (request.default_max_tokens, max_new_tokens) if count is not None]
    return replace(request, default_max_tokens=min(known, default=None))


def _aborted(rest: Iterable[Delta | Exception | Abort], unfinished: set[int]) -> deque[Delta | Exception | Abort]:
    """The end of a stream: the deltas of `rest`, and an end for each choice of `unfinished` that has none among them."""
    deltas = [item for item in rest if isinstance(item, Delta)]
    left = unfinished - {delta.index for delta in deltas if delta.finish is not None}
    return deque([*deltas, *(Delta(index=index, finish=FinishReason.ABORT) for index in sorted(left))])
