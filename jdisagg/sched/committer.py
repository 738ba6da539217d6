"""Takes a step's results in: progress, new tokens, ends, outputs. Results of preempted or ended sequences are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from jdisagg.core.errors import InvalidRequest, NumericalError, RequestError
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.sched.plan import Sampled, StepResult
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.steps import Row
from jdisagg.sched.stops import Stop, find_stop
from jdisagg.sched.table import SequenceTable


@dataclass(frozen=True, slots=True)
class Committer:
    """Moves sequences of its table as tokens come in."""

    table: SequenceTable
    role: Role

    def commit(self, rows: dict[int, Row], result: StepResult) -> list[Output]:
        """Outputs of one step, in the order in which its rows were planned."""
        sampled = {s.slot: s for s in result.sampled}
        outputs: list[Output] = []
        page_size = self.table.pages.page_size
        for slot, row in rows.items():
            sequence = row.sequence
            if row.epoch != sequence.epoch:
                continue
            sequence.num_computed = row.end
            fills_page = row.end >= (sequence.holding.num_indexed + 1) * page_size
            if slot in result.prompt_logprobs:
                sequence.told.prompt_logprobs.extend(result.prompt_logprobs[slot])
            if not row.num_samples:
                if fills_page:
                    self.table.pages.cache_full_pages(sequence)
                continue
            assert slot in sampled, f"step {result.step_id} has no token for slot {slot} ({sequence.request_id})"
            sequence.num_in_flight -= row.num_samples
            new = sampled[slot]
            if not fills_page and self._is_plain(sequence, new):
                sequence.generated.append(new.token_ids[0])
                outputs.append(
                    Output(request_id=sequence.request_id, attempt=sequence.request.attempt, token_ids=new.token_ids)
                )
            elif (output := self._take_sampled(row, new, result.step_id)) is not None:
                outputs.append(output)
        return outputs

    def _is_plain(self, sequence: Sequence, new: Sampled) -> bool:
        """One more token of many, which ends nothing and has nothing to be said about it: most of them."""
        return (
            len(new.token_ids) == 1
            and new.bad is None
            and new.refused is None
            and new.logprobs is None
            and 0 < len(sequence.generated) < sequence.max_tokens - 1
            and new.token_ids[0] not in sequence.stop_ids
            and self.role is not Role.PREFILL
        )

    def take_first(self, sequence: Sequence, first: Output) -> Output:
        """The first token of a remote sequence, with the peer's verdict on its end.

        A second "first token" (from another peer, after a failure) is ignored: what was sent never changes.
        """
        if sequence.num_known > sequence.target:
            return self.output(sequence, first, ())
        if sequence.told.cached_tokens is None:
            sequence.told.cached_tokens = _cached_tokens(sequence, first)
        sequence.generated.extend(first.token_ids)
        output = self.output(sequence, first, first.token_ids)
        if first.finish is not None:
            self.table.stats.served += 1
            self.table.end(sequence)
        return output

    def output(self, sequence: Sequence, like: Output, token_ids: tuple[int, ...]) -> Output:
        """`like`, as this worker's output of `sequence`."""
        return Output(
            request_id=sequence.request_id,
            attempt=sequence.request.attempt,
            token_ids=token_ids,
            logprobs=like.logprobs if token_ids else None,
            prompt_logprobs=like.prompt_logprobs if token_ids or like.finish else None,
            finish=like.finish,
            stop_token_id=like.stop_token_id,
            error=like.error,
            cached_tokens=sequence.told.cached_tokens or 0,
            provenance=like.provenance,
        )

    def failure(self, sequence: Sequence, error: RequestError) -> Output | None:
        """End a sequence; its last output, None when that was sent before. One whose numbers went bad leaves no page to be
        found: with the fault in a cached page every later request of that prefix would fail, too."""
        if isinstance(error, NumericalError):
            self.table.pages.distrust(sequence.holding)
        self.table.end(sequence)
        if sequence.told.is_final:
            return None
        return self.output(sequence, Output(request_id=sequence.request_id, finish=FinishReason.ERROR, error=error), ())

    def fails(self, row: Row, sampled: Sampled) -> bool:
        """Whether the request fails for it: not when it has all its tokens before the bad one."""
        tokens, sequence = sampled.token_ids, row.sequence
        num_wanted = min(row.num_samples, sequence.max_tokens - len(sequence.generated))  # 0: the prompt alone was wanted
        is_wanted = sampled.bad is not None and len(tokens) <= num_wanted
        return is_wanted and self._up_to_end(sequence, tokens[:-1])[1] is None

    def _take_sampled(self, row: Row, sampled: Sampled, step_id: int) -> Output | None:
        sequence = row.sequence
        if sampled.refused is not None:
            message = f"request {sequence.request_id}: its grammar cannot go on: {sampled.refused}"
            return self.failure(sequence, InvalidRequest(message, field="grammar"))
        if self.fails(row, sampled):
            message = (
                f"request {sequence.request_id}: step {step_id} produced no usable logits ({sampled.bad}); other requests go on"
            )
            return self.failure(sequence, NumericalError(message))
        if (index := _unscored(sequence)) is not None:
            where = f"prompt token {index}, counted from 0"
            message = f"request {sequence.request_id}: infinity or NaN in the logits of {where}; other requests go on"
            return self.failure(sequence, NumericalError(message))
        # With the first token only; nothing predicts the first prompt token.
        prompt_logprobs = (None, *sequence.told.prompt_logprobs) if sequence.wants_prompt_logprobs else None
        sequence.told.prompt_logprobs.clear()
        tokens, stop = self._up_to_end(sequence, sampled.token_ids[: row.num_samples])
        sequence.generated.extend(tokens)
        finish, stop_token_id = stop or (None, None)
        self.table.pages.cache_full_pages(sequence)
        logprobs = sampled.logprobs[: len(tokens)] if sampled.logprobs is not None and tokens else None
        output = Output(
            request_id=sequence.request_id,
            attempt=sequence.request.attempt,
            token_ids=tokens,
            logprobs=logprobs if sequence.request.sampling.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_token_id=stop_token_id,
            cached_tokens=sequence.told.cached_tokens or 0,
        )
        if self.role is Role.PREFILL:
            sequence.told.is_final = finish is not None
            self.table.vacate(sequence)
            self.table.move(sequence, Status.PUBLISHING)
        elif finish is not None:
            self.table.end(sequence)
        return output

    def _up_to_end(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], Stop | None]:
        """Of these, its next tokens, those up to its last one, and why that is the last; what lies behind it is dropped."""
        sampling, num_generated = sequence.request.sampling, len(sequence.generated)
        if sampling.max_tokens == 0:  # only the prompt was wanted (its log-probabilities)
            return (), (FinishReason.LENGTH, None)
        for count, token_id in enumerate(token_ids, start=1):
            stop = find_stop(token_id, num_generated + count, sampling, sequence.stop_ids)
            if stop is not None:
                return token_ids[:count], stop
        return token_ids, None


def _unscored(sequence: Sequence) -> int | None:
    """The first prompt token whose log-probability is NaN; None when each has one, or has been told."""
    scores = sequence.told.prompt_logprobs if sequence.wants_prompt_logprobs else ()
    return next((index for index, score in enumerate(scores, start=1) if isnan(score.logprob)), None)


def _cached_tokens(sequence: Sequence, first: Output) -> int:
    """Prompt tokens that nobody computed for this request: those its peer found, or those that are here, less what the peer
    computed all the same (the last token for its logits, all of them for their log-probabilities)."""
    num_prompt = len(sequence.request.prompt_token_ids)
    num_computed = first.provenance.prefilled_tokens if first.provenance is not None else 0
    return min(num_prompt, max(first.cached_tokens, min(sequence.holding.held_tokens, num_prompt - num_computed)))
