"""One client request on its way through one or several workers."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from jdisagg.api.mailbox import Mailbox
from jdisagg.core.errors import RequestError
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Provenance
from jdisagg.router.booking import Booking
from jdisagg.router.entry import Entry
from jdisagg.router.homes import Home
from jdisagg.router.setbacks import Lost, Setbacks

_NOTHING = (None, None, None, None)


@dataclasses.dataclass(slots=True)
class _Recoveries:
    """Steps taken to survive failures, by rung."""

    earlier: tuple[str, ...] = ()  # in the attempts before this one
    latest: tuple[str, ...] = ()  # in this one, as its worker told last


@dataclasses.dataclass(slots=True)
class _Prompt:
    """What the client was told of its prompt."""

    most_cached: int  # tokens that may still be said to be: behind a replay what it computed itself is in a cache, too
    cached: int = 0
    has_logprobs: bool = False


class Flight:
    """What was asked, what was delivered, where it runs. `events` holds what the current attempt brought."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request  # as the client sent it
        self.attempt = request.attempt
        self.home = Home()  # its siblings', from `Placement.begin` on
        self.events = Mailbox[Output | Lost | RequestError]()  # an error ends the request
        self.entry: Entry | None = None  # the worker it runs on
        self.prefill: Booking | None = None  # on the P named first, until the first token
        self.unproven: Booking | None = None  # the same, until it is known which worker computed the prompt
        self.card: ModelCard | None = None  # of the worker that answers it, or answered last; None = any may
        self.bits = ""  # that it began with, with `exact` numerics; "" = any will do
        self.setbacks = Setbacks()
        self.finished = False
        self.enough = False  # its client has all that it wanted, before a worker said that it is finished
        self._delivered = array("i")
        self._recoveries = _Recoveries()
        self._prompt = _Prompt(most_cached=len(request.prompt_token_ids))

    @property
    def fingerprint(self) -> str | None:
        """What its client is told of who answers."""
        return None if self.card is None else self.card.fingerprint

    @property
    def answers(self) -> str | None:
        """As in `ModelCard`; None = any worker may."""
        return None if self.card is None else self.card.answers

    @property
    def num_delivered(self) -> int:
        """Tokens the client has."""
        return len(self._delivered)

    @property
    def most_tokens(self) -> int:
        """Of prompt and output together, in all attempts."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def least_tokens(self) -> int:
        """What a worker must hold for another token to come: all of them, or, of an answer of no stated length, one more."""
        if not self.request.fills_context:
            return self.most_tokens
        return len(self.request.prompt_token_ids) + max(self.num_delivered + 1, self.request.sampling.min_tokens)

    @property
    def prefill_tokens(self) -> int:
        """What a prefill worker must hold: all of it so far, and the token it gives."""
        return self.request.num_tokens + self.num_delivered + 1

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of it has reached the client: another model could still answer."""
        return not self._delivered and not self._prompt.has_logprobs

    def attempt_request(self, prefill_peers: tuple[str, ...], max_model_len: int, num_asked: int) -> EngineRequest:
        """The request for the current attempt, at a worker of that context, one of `num_asked`: everything delivered so far
        counts as generated."""
        sampling = self.request.sampling
        if self.request.fills_context:
            room = max_model_len - len(self.request.prompt_token_ids)
            sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        if self._prompt.has_logprobs:
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return dataclasses.replace(
            self.request,
            sampling=sampling,
            attempt=self.attempt,
            generated_token_ids=self.request.generated_token_ids + tuple(self._delivered),
            prefill_peers=prefill_peers,
            num_asked=num_asked,
        )

    def hear(self, event: Output | Lost) -> None:
        """The attempt's worker sent it, or is lost: what that says against the request counts now, and not when its client
        reads on, as the worker may be back before that."""
        if isinstance(event, Lost):
            self.setbacks.blame_for(event, self.attempt)
        self.events.put(event)

    def replay(self) -> None:
        """Begin the next attempt; what the old one still sends has an older number and is dropped."""
        self.attempt += 1
        if self.is_untouched:
            self.card, self.bits = None, ""
        else:
            self._prompt.most_cached = self._prompt.cached
        self._recoveries = _Recoveries(earlier=(*self._recoveries.earlier, *self._recoveries.latest, "replay"))
        self.events.clear()

    def objection(self, output: Output) -> str:
        """Why `output` is no answer to this attempt, and is not delivered; empty = it may be one."""
        assert self.entry is not None  # an attempt's outputs come from its worker
        worker, vocab_size, token_ids = self.entry.member.worker, self.entry.member.card.vocab_size, output.token_ids
        room = self.request.remaining_tokens - len(self._delivered)
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size and len(token_ids) <= room):
            return ""
        odd = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        what = f"{len(token_ids)} tokens, wanted {room} at most"
        if odd:
            what = f"token {odd[0]}, wanted one of [0, {vocab_size})"
        return f"worker {worker} sent {what}; take it, or the prefill worker that it names, out of the fleet"

    def accept(self, output: Output) -> Output:
        """Note what is delivered; returns it as the client should see it: one attempt, nothing twice."""
        self._delivered.extend(output.token_ids)
        self._prompt.cached = cached_tokens = min(output.cached_tokens, self._prompt.most_cached)
        rest = output.finish, output.error, output.prompt_logprobs, output.provenance
        if rest == _NOTHING:  # as in most of them, which take a third of the time so
            return Output(
                request_id=output.request_id,
                attempt=self.request.attempt,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                cached_tokens=cached_tokens,
                fingerprint=self.fingerprint,
            )
        self.finished = output.finish is not None
        prompt_logprobs = None if self._prompt.has_logprobs else output.prompt_logprobs
        self._prompt.has_logprobs |= prompt_logprobs is not None
        return dataclasses.replace(
            output,
            attempt=self.request.attempt,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
            provenance=self._provenance(output),
            fingerprint=self.fingerprint,
        )

    def complete(self) -> Output | None:
        """The end of a request whose last token was delivered but whose worker went down before it said so."""
        if self.num_delivered < self.request.remaining_tokens:
            return None
        return self.accept(Output(request_id=self.request.request_id, finish=FinishReason.LENGTH))

    def failed(self, error: RequestError) -> Output:
        """The end of a request that cannot be saved."""
        return self.accept(Output(request_id=self.request.request_id, finish=FinishReason.ERROR, error=error))

    def whereabouts(self) -> str:
        """The worker that has it now, or had it last, and how often it was replayed, for the log."""
        member, num = None if self.entry is None else self.entry.member, self.setbacks.replays
        if member is not None:
            where = f"on {member.role.value} worker {member.worker}"
        else:
            where = f"on worker {self.setbacks.worker}, which lost it" if self.setbacks.worker else "on no worker"
        return f"replayed {num} time{'s' if num > 1 else ''}, ended {where}" if num else where

    def summary(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "request_id": self.request.request_id,
            "attempt": self.attempt,
            "worker": self.entry.member.address if self.entry else None,
            "delivered": self.num_delivered,
            "deaths": self.setbacks.deaths,
        }

    def _provenance(self, output: Output) -> Provenance | None:
        provenance = output.provenance
        if provenance is None and (output.finish is None or not self._recoveries.earlier):
            return None
        provenance = provenance or Provenance()
        self._recoveries.latest = provenance.recoveries
        return dataclasses.replace(provenance, recoveries=self._recoveries.earlier + provenance.recoveries)
