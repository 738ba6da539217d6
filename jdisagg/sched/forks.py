"""Choices of one request share the KV of their prompt.

The first to come leads: it is computed (or fetched) like any other. The rest wait as FORKING until its prompt KV is written,
then each takes references to the full pages, copies the page it will write into, and is READY to decode from the prompt's
last token.
A group whose leader ends before that gets a new leader.
"""

from __future__ import annotations

from collections.abc import Iterable

from jdisagg.core.requests import EngineRequest
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status


class ForkGroups:
    """Live sequences by the fork group their requests name."""

    def __init__(self) -> None:
        self._members: dict[str, list[Sequence]] = {}

    def can_wait(self, request: EngineRequest, *, remote: bool) -> bool:
        """A sibling with the same prompt is live and will have what this request needs of it.

        Not for resumed requests, nor where every position has to be computed for its log-probabilities; and a remote one that
        ends with its first token never fetches any KV that others could share.
        """
        fewest = 2 if remote else 1
        if request.generated_token_ids or request.sampling.prompt_logprobs is not None or request.sampling.max_tokens < fewest:
            return False
        return any(_shares_prompt(s.request, request) for s in self._members.get(request.fork_group, ()))

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

    def donors(self, children: Iterable[Sequence]) -> dict[str, Sequence]:
        """Of each that has one, by request id, a sibling in whose pages all of the prompt but its last token is written, or
        will be by a dispatched step."""
        found: dict[str, Sequence] = {}
        with_pages: dict[str, list[Sequence]] = {}  # looked for once per group, however many of it wait
        for child in children:
            group = child.request.fork_group
            if group not in with_pages:
                with_pages[group] = [s for s in self._members[group] if s.status in (Status.RUNNING, Status.READY)]
            wanted = len(child.request.prompt_token_ids) - 1
            ready = (s for s in with_pages[group] if s.num_scheduled >= wanted)
            if (donor := next((s for s in ready if _shares_prompt(s.request, child.request)), None)) is not None:
                found[child.request_id] = donor
        return found


def _shares_prompt(one: EngineRequest, other: EngineRequest) -> bool:
    """A group's name alone proves nothing: clients choose request ids, and two of them may choose the same one."""
    ours, theirs = one.prompt_token_ids, other.prompt_token_ids
    return one.cache_salt == other.cache_salt and (ours is theirs or ours == theirs)  # comparing a long one takes a while
