"""Where a decode worker has a prompt computed: which prefill workers it may ask for a request, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from jdisagg.core.bits import UNLIKE_TOKENS
from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest
from jdisagg.core.speed import taken_for
from jdisagg.handoff.messages import HandoffId
from jdisagg.roles.ports import PeerClient

KnownPeers = Callable[[Callable[[str], bool]], tuple[str, ...]]  # told whether others are asked before a peer


class PeerChoice:
    """By `--local-prefill`, the request's own list, the workers known here, what was last heard of them and what they compute
    for us."""

    def __init__(self, config: TransferConfig, peers: PeerClient, known_peers: KnownPeers) -> None:
        """`known_peers`: for requests that name none, or none that is to be asked."""
        self._policy = config.local_prefill
        self._below_tokens = config.local_prefill_below_tokens
        self._peers = peers
        self._known_peers = known_peers
        self._asked: dict[str, dict[HandoffId, tuple[str, int]]] = {}  # by request: peer and tokens, until its first token
        self._waiting = Counter[str]()  # of these the tokens by peer: it is looked at again and again for those that wait

    def opened(self, handoff: HandoffId, peer: str, num_tokens: int) -> None:
        """`peer` was asked to compute so many tokens; `closed` must follow."""
        self._asked.setdefault(handoff.request_id, {})[handoff] = (peer, num_tokens)
        self._waiting[peer] += num_tokens

    def computed(self, request_id: str) -> None:
        """Its first token has come: nobody computes its prompt any more."""
        for peer, num_tokens in self._asked.pop(request_id, {}).values():
            self._no_longer(peer, num_tokens)

    def closed(self, handoff: HandoffId) -> None:
        """The stream is over; idempotent."""
        of_request = self._asked.get(handoff.request_id, {})
        if (asked := of_request.pop(handoff, None)) is not None:
            self._no_longer(*asked)
        if not of_request:
            self._asked.pop(handoff.request_id, None)

    def _no_longer(self, peer: str, num_tokens: int) -> None:
        self._waiting[peer] -= num_tokens
        if not self._waiting[peer]:
            del self._waiting[peer]

    def is_here(self, request: EngineRequest) -> bool:
        """Whether the prompt is computed here, without asking anybody."""
        if self._policy is LocalPrefill.NEVER:
            return False
        if request.sampling.prompt_logprobs is not None and not self.of(request):
            return True
        return self._policy is LocalPrefill.BELOW_TOKENS and request.num_tokens < self._below_tokens

    def of(self, request: EngineRequest) -> tuple[str, ...]:
        """Prefill workers to ask, the best first: as the request's router says (least busy first), else, or where all of those
        are down or doubtful, the first known one at which no more than this prompt waits for us already, less where it is
        slower, and UNLIKE_TOKENS less where it computes other bits. A stream that has begun may have outlived its list: the
        known ones follow."""
        answering, down = self._ordered(request, may_be_old=bool(request.generated_token_ids))
        # with nothing to fall back on, asking is better than failing: the others may be unfit
        return (*answering, *down) if self._policy is LocalPrefill.NEVER else answering

    def later(self, request: EngineRequest) -> tuple[str, ...]:
        """The same for one that those were full for, or lost: of all that are known by now, who may answer."""
        answering, _ = self._ordered(request, may_be_old=True)
        return answering

    def _ordered(self, request: EngineRequest, *, may_be_old: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Who may answer, and who is down. `may_be_old`: the request's list, which names some that are gone, and not all."""
        named = request.prefill_peers
        is_named = not all(map(self._is_shunned, named))
        known = self._known_peers(self._is_shunned) if may_be_old or not is_named else ()
        everyone, first = dict.fromkeys((*named, *known)), named if is_named else ()

        down = tuple(peer for peer in everyone if self._peers.is_down(peer))
        gone = self._unheard_of(named, known) if may_be_old else set[str]()
        there = [peer for peer in everyone if peer not in down]
        speeds = dict(zip(there, taken_for([self._peers.speed(peer) for peer in there]), strict=True))
        num_tokens, fastest = max(1, request.num_tokens), max(speeds.values(), default=1.0)

        def num_ahead(peer: str) -> int:
            """How many prompts like this one the fastest of them computes before that one is done with it."""
            waiting = self._waiting[peer] + UNLIKE_TOKENS * self._peers.is_unlike(peer)
            return 0 if peer in first else int((waiting + num_tokens) * (fastest / speeds[peer]) / num_tokens) - 1

        def rank(peer: str) -> tuple[bool, bool, int, bool]:
            # one of another kind is idle, and so is one that only we cannot reach: both come first in a list by load
            is_unlike = peer not in first and self._peers.is_unlike(peer)
            return self._peers.is_doubtful(peer), peer in gone, num_ahead(peer), is_unlike

        return tuple(sorted(there, key=rank)), down

    def _unheard_of(self, named: tuple[str, ...], known: tuple[str, ...]) -> set[str]:
        """Of `named`, whom no router tells of any more, and who has not answered us: after a roll, addresses of nobody."""
        failures = self._peers.failures()
        return {peer for peer in named if peer not in known and failures.get(peer) != ""}

    def _is_shunned(self, peer: str) -> bool:
        """Whether others are asked first, if at all."""
        return self._peers.is_down(peer) or self._peers.is_doubtful(peer)

    def snapshot(self) -> dict[str, Any]:
        """Tokens that peers compute for us, as JSON-able data."""
        return dict(self._waiting)
