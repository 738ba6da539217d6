"""Where a decode worker has a prompt computed: which prefill workers it may ask for a request, or none."""

from __future__ import annotations

from collections.abc import Callable

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest
from jdisagg.roles.ports import PeerClient


class PeerChoice:
    """By `--local-prefill`, the request's own list, the workers known here and what was last heard of them."""

    def __init__(self, config: TransferConfig, peers: PeerClient, known_peers: Callable[[], tuple[str, ...]]) -> None:
        """`known_peers`: for requests that name none."""
        self._policy = config.local_prefill
        self._below_tokens = config.local_prefill_below_tokens
        self._peers = peers
        self._known_peers = known_peers

    def is_here(self, request: EngineRequest) -> bool:
        """Whether the prompt is computed here, without asking anybody."""
        if self._policy is LocalPrefill.NEVER:
            return False
        if request.sampling.prompt_logprobs is not None and not self.of(request):
            return True
        return self._policy is LocalPrefill.BELOW_TOKENS and request.num_tokens < self._below_tokens

    def of(self, request: EngineRequest) -> tuple[str, ...]:
        """Prefill workers to ask, the best first."""
        peers = request.prefill_peers or self._known_peers()
        there = [peer for peer in peers if not self._peers.is_down(peer)]
        # routers name the least busy first: one of another kind is idle, and so is one that only we cannot reach
        answering = tuple(sorted(there, key=self._peers.is_doubtful))
        never = self._policy is LocalPrefill.NEVER
        return answering or (peers if never else ())  # with nothing to fall back on, asking is better than failing
