"""KV from decode to prefill workers: the parts of both that lend and borrow, wired to a transfer backend."""

from __future__ import annotations

from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Lending
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.kv_lending import KVLending
from jdisagg.serve.engines import Core
from jdisagg.transfer.base import Fetcher, Publisher


def wants_to_borrow(core: Core) -> bool:
    """Whether a prefill engine asks for KV at all: what it fetched is found again in the prefix cache."""
    return core.config.transfer.want_min_tokens > 0 and core.config.cache.enable_prefix_caching


def borrowing(core: Core, fetcher: Fetcher) -> KVBorrowing:
    """A prefill engine's half; `wants_to_borrow` is true. `fetcher` posts to the engine's inbox."""
    config, spec = core.config.transfer, core.kv_spec
    return KVBorrowing(
        Borrower(config, bytes_per_token=spec.bytes_per_token),
        min_tokens=config.want_min_tokens,
        page_size=core.runner.page_size,
        dtype=spec.dtype,
        scheduler=core.scheduler,
        runner=core.runner,
        fetcher=fetcher,
        metrics=core.metrics,
    )


def lending(core: Core, publisher: Publisher, address: str) -> KVLending:
    """A decode engine's half: its pieces are fetched from `address`. `publisher` posts to the engine's inbox."""
    spec = core.kv_spec
    return KVLending(
        Lender(core.config.transfer, bytes_per_token=spec.bytes_per_token),
        Lending(address=address, backend=publisher.name, dtype=spec.dtype),
        scheduler=core.scheduler,
        runner=core.runner,
        publisher=publisher,
        metrics=core.metrics,
    )
