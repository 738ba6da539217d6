"""Who P and D are, and whether they can work together: the contents of Hello, without gRPC.

Page size, KV dtype and tensor parallelism may differ (they are converted); weights, numerics and the shape of a token's KV
may not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.core.fingerprint import Parts, difference
from jdisagg.core.requests import GrammarKind
from jdisagg.core.told import told
from jdisagg.kv.spec import KVSpec

OLDEST_PROTOCOL, PROTOCOL = 1, 2  # understood here
SHARED_PULSE = 2  # since this one the streams of a pair share their heartbeats
_WORKER = re.compile(r"pid \d+ @ (\S+:\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """One KV group and the page size it is kept in."""

    spec: KVSpec
    page_size: int  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A transfer backend this worker can use. `version`: unlike ones do not pair; empty = any version understands it."""

    name: str
    version: str = ""
    num_transport_addresses: int = 0
    endpoint: str | None = None  # HOST:PORT of its own, where D has to reach it


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a worker says of itself. `epoch` changes at every start of its process."""

    fingerprint: str  # weights + config + numerics
    fingerprint_parts: Parts = ()
    worker: str  # "pid 123 @ 127.0.0.1:9000"
    epoch: str
    groups: tuple[CacheGroup, ...]
    backends: tuple[Backend, ...]  # in order of preference
    build: str = ""  # which version of this package it runs; "" = it does not say
    grammars: frozenset[GrammarKind] = frozenset()  # requests with one of these may be handed to it
    bits: str = ""  # as in `jdisagg.core.bits`
    min_protocol: int = OLDEST_PROTOCOL
    max_protocol: int = PROTOCOL

    @property
    def address(self) -> str | None:
        """HOST:PORT under which it registers with routers, by its own word; None where that has another form."""
        return None if (found := _WORKER.fullmatch(self.worker)) is None else found[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How this pair talks."""

    protocol: int
    backends: tuple[str, ...]  # that both can use, in the order D prefers

    @property
    def backend(self) -> str:
        """The one to begin with."""
        return self.backends[0]


class Incompatible(Exception):
    """Two workers cannot pair; names the field, what was wanted and what came, and other fields that differ as well."""

    def __init__(self, field: str, wanted: object, got: object, *, also: Sequence[str] = ()) -> None:
        others = f" (also: {told(', '.join(also))})" if also else ""
        super().__init__(
            f"{told(field)}: wanted {told(str(wanted))}, got {told(str(got))}{others}; pair workers that agree on it"
        )
        self.field = field


def agree(producer: Identity, consumer: Identity) -> Agreement:
    """Settle protocol and backend between P (`producer`) and D (`consumer`); raises Incompatible, seen from P."""
    protocol = min(producer.max_protocol, consumer.max_protocol)
    if protocol < max(producer.min_protocol, consumer.min_protocol):
        wanted = f"[{producer.min_protocol}, {producer.max_protocol}]"
        raise Incompatible("protocol", wanted, f"[{consumer.min_protocol}, {consumer.max_protocol}]")
    if producer.fingerprint != consumer.fingerprint:
        if (differs := difference(producer.fingerprint_parts, consumer.fingerprint_parts)) is not None:
            raise Incompatible(differs.name, differs.wanted, differs.got, also=differs.also)
        raise Incompatible("fingerprint", producer.fingerprint, consumer.fingerprint)
    if len(producer.groups) != len(consumer.groups):
        raise Incompatible("groups", len(producer.groups), len(consumer.groups))
    for index, (ours, theirs) in enumerate(zip(producer.groups, consumer.groups, strict=True)):
        for name in ("num_layers", "num_kv_heads", "features", "kind", "window"):
            wanted, got = getattr(ours.spec, name), getattr(theirs.spec, name)
            if wanted != got:
                raise Incompatible(f"groups[{index}].{name}", wanted, got)
    common = (theirs.name for theirs in consumer.backends if any(_same_backend(ours, theirs) for ours in producer.backends))
    if backends := tuple(common):
        return Agreement(protocol=protocol, backends=backends)
    raise Incompatible("backends", _names(producer), _names(consumer))


def builds_of(producer: Identity, consumer: Identity) -> str:
    """For the text of a refusal: which builds the two say they are, where these differ."""
    if not producer.build or not consumer.build or producer.build == consumer.build:
        return ""
    return f" (builds {producer.build} and {consumer.build})"


def _same_backend(producer: Backend, consumer: Backend) -> bool:
    if producer.name != consumer.name:
        return False
    if producer.version and consumer.version and producer.version != consumer.version:
        return False
    # A consumer with fewer transport addresses than its producer kills its process when it pulls.
    return consumer.num_transport_addresses >= producer.num_transport_addresses


def _names(identity: Identity) -> str:
    return ", ".join(f"{b.name} {b.version}".strip() for b in identity.backends) or "none"
