"""Where a decode worker has a prompt computed: which prefill workers it may ask for a request, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest
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

    def opened(self, handoff: HandoffId, peer: str, num_tokens: int) -> None:
        """`peer` was asked to compute so many tokens; `closed` must follow."""
        self._asked.setdefault(handoff.request_id, {})[handoff] = (peer, num_tokens)

    def computed(self, request_id: str) -> None:
        """Its first token has come: nobody computes its prompt any more."""
        self._asked.pop(request_id, None)

    def closed(self, handoff: HandoffId) -> None:
        """The stream is over; idempotent."""
        of_request = self._asked.get(handoff.request_id, {})
        of_request.pop(handoff, None)
        if not of_request:
            self._asked.pop(handoff.request_id, None)

    def is_here(self, request: EngineRequest) -> bool:
        """Whether the prompt is computed here, without asking anybody."""
        if self._policy is LocalPrefill.NEVER:
            return False
        if request.sampling.prompt_logprobs is not None and not self.of(request):
            return True
        return self._policy is LocalPrefill.BELOW_TOKENS and request.num_tokens < self._below_tokens

    def of(self, request: EngineRequest) -> tuple[str, ...]:
        """Prefill workers to ask, the best first: as the request's router says (least busy first), else, or where all of those
        are down or doubtful, the first known one at which no more than this prompt waits for us already. A stream that has
        begun may have outlived its list: the known ones follow."""
        is_named = not all(map(self._is_shunned, request.prefill_peers))
        known, waiting = self._known(request, is_named=is_named), self._waiting()
        down = [peer for peer in known if self._peers.is_down(peer)]
        there = [peer for peer in known if peer not in down]
        if not is_named:
            there.sort(key=lambda peer: waiting[peer] // max(1, request.num_tokens))
        # one of another kind is idle, and so is one that only we cannot reach: both come first in a list by load
        answering = tuple(sorted(there, key=self._peers.is_doubtful))
        # with nothing to fall back on, asking is better than failing: the others may be unfit
        return (*answering, *down) if self._policy is LocalPrefill.NEVER else answering

    def _is_shunned(self, peer: str) -> bool:
        """Whether others are asked first, if at all."""
        return self._peers.is_down(peer) or self._peers.is_doubtful(peer)

    def _known(self, request: EngineRequest, *, is_named: bool) -> tuple[str, ...]:
        if is_named and not request.generated_token_ids:
            return request.prefill_peers
        return tuple(dict.fromkeys((*request.prefill_peers, *self._known_peers(self._is_shunned))))

    def _waiting(self) -> Counter[str]:
        """Tokens by peer."""
        found = Counter[str]()
        for peer, num_tokens in chain.from_iterable(streams.values() for streams in self._asked.values()):
            found[peer] += num_tokens
        return found

    def snapshot(self) -> dict[str, Any]:
        """Tokens that peers compute for us, as JSON-able data."""
        return dict(self._waiting())
