"""Choices of one request share the KV of their prompt.

The first to come leads: it is computed (or fetched) like any other. The rest wait as FORKING until its prompt KV is written,
then each takes references to the full pages, copies the page it will write into, and is READY to decode from the prompt's
last token.
A group whose leader ends before that gets a new leader.
"""

from __future__ import annotations

from collections.abc import Mapping

from jdisagg.core.requests import EngineRequest
from jdisagg.sched.queue import SequenceQueue
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status


class ForkGroups:
    """Live sequences by the fork group their requests name."""

    def __init__(self) -> None:
        self._members: dict[str, list[Sequence]] = {}

    def can_wait(self, request: EngineRequest, *, remote: bool) -> bool:
        """A sibling with the same prompt is live and will have what this request needs of it."""
        if not may_wait(request, remote=remote):
            return False
        return any(_shares_prompt(s.request, request) for s in self._members.get(request.fork_group, ()))

    def has_prompt(self, request: EngineRequest) -> bool:
        """Whether its prompt is, as one object, that of a live sibling: what was found of that holds for this."""
        siblings = self._members.get(request.fork_group, ())
        return any(s.request.prompt_token_ids is request.prompt_token_ids for s in siblings)

    def add(self, sequence: Sequence) -> None:
        """A sequence came; those that name no group are nobody's sibling."""
        if sequence.request.fork_group:
            self._members.setdefault(sequence.request.fork_group, []).append(sequence)

    def remove(self, sequence: Sequence) -> Sequence | None:
        """A sequence ended. Returns the sibling that has to lead from now on, if the rest waits for nobody."""
        group = sequence.request.fork_group
        if not group:
            return None
        members = self._members[group]
        members.remove(sequence)
        if not members:
            del self._members[group]
            return None
        # Most end together, when nobody waits any more: prompts are long, and not compared for nothing.
        waiting = (s for s in members if s.status is Status.FORKING)
        heir = next((s for s in waiting if _shares_prompt(s.request, sequence.request)), None)
        if heir is None:
            return None
        others = (s for s in members if s.status is not Status.FORKING)
        return None if any(_shares_prompt(s.request, heir.request) for s in others) else heir

    def donors(self, queues: Mapping[Status, SequenceQueue]) -> dict[Sequence, Sequence]:
        """Who can fork, in order, each with the sibling to fork from: all of their prompt but its last token is written in its
        pages, or will be by a dispatched step. Groups without such a sibling are not gone through: any number may wait."""
        found: list[tuple[Sequence, Sequence]] = []
        if queues[Status.FORKING]:
            in_memory = (*queues[Status.RUNNING], *queues[Status.READY])
            for group in {s.request.fork_group for s in in_memory if s.request.fork_group and _has_prompt(s)}:
                siblings = [s for s in self._members[group] if s.status in (Status.RUNNING, Status.READY) and _has_prompt(s)]
                for child in (s for s in self._members[group] if s.status is Status.FORKING):
                    donor = next((s for s in siblings if _shares_prompt(s.request, child.request)), None)
                    if donor is not None:
                        found.append((child, donor))
        return dict(sorted(found, key=lambda pair: pair[0].order))


def may_wait(request: EngineRequest, *, remote: bool) -> bool:
    """A choice that takes its prompt from a sibling, if one is there.

    Not resumed requests, nor where every position has to be computed for its log-probabilities; and a remote one that ends with
    its first token never fetches any KV that others could share.
    """
    is_new = not request.generated_token_ids and request.sampling.prompt_logprobs is None
    return bool(request.fork_group) and is_new and request.sampling.max_tokens >= (2 if remote else 1)


def _has_prompt(sequence: Sequence) -> bool:
    return sequence.num_scheduled >= len(sequence.request.prompt_token_ids) - 1


def _shares_prompt(one: EngineRequest, other: EngineRequest) -> bool:
    """A group's name alone proves nothing: clients choose request ids, and two of them may choose the same one."""
    ours, theirs = one.prompt_token_ids, other.prompt_token_ids
    return one.cache_salt == other.cache_salt and (ours is theirs or ours == theirs)  # comparing a long one takes a while
