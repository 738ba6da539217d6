"""Between the protos of Hello and registration and `jdisagg.handoff.identity`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jdisagg.api.codec import GRAMMAR_KINDS, decode_fields, encode_fields
from jdisagg.core.fingerprint import Parts
from jdisagg.core.requests import GrammarKind
from jdisagg.core.told import told
from jdisagg.handoff.identity import Backend, CacheGroup, Identity
from jdisagg.kv.spec import KVSpec
from jdisagg.v1 import peer_pb2

_FIRST_KINDS = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK})


def encode_identity(identity: Identity) -> peer_pb2.Identity:
    """Field by field."""
    return encode_fields(
        identity,
        peer_pb2.Identity,
        groups=[encode_fields(group.spec, peer_pb2.CacheGroup, page_size=group.page_size) for group in identity.groups],
        backends=[encode_fields(backend, peer_pb2.TransferBackend) for backend in identity.backends],
        fingerprint_parts=encode_parts(identity.fingerprint_parts),
        **encode_grammars(identity.grammars),
    )


def encode_parts(parts: Parts) -> list[peer_pb2.FingerprintPart]:
    """One by one."""
    return [peer_pb2.FingerprintPart(name=name, value=value) for name, value in parts]


def decode_parts(message: peer_pb2.Identity) -> Parts:
    """Empty from a worker that does not say."""
    return tuple((told(part.name), told(part.value)) for part in message.fingerprint_parts)


def encode_grammars(kinds: Collection[GrammarKind]) -> dict[str, Any]:
    """Fields of Identity."""
    return {"grammars": bool(kinds), "grammar_kinds": sorted(GRAMMAR_KINDS[kind] for kind in kinds)}


def decode_grammars(message: peer_pb2.Identity) -> frozenset[GrammarKind]:
    """Those that are known here; of a worker that names none the first that there were."""
    if not message.grammars:
        return frozenset()
    named = frozenset(kind for kind, number in GRAMMAR_KINDS.items() if number in message.grammar_kinds)
    return named if message.grammar_kinds else _FIRST_KINDS


def decode_identity(message: peer_pb2.Identity) -> Identity:
    """An empty `kind` means "full", window 0 means none."""
    groups = tuple(
        CacheGroup(
            spec=decode_fields(group, KVSpec, kind=group.kind or "full", window=group.window or None),
            page_size=group.page_size,
        )
        for group in message.groups
    )
    return decode_fields(
        message,
        Identity,
        worker=told(message.worker),
        build=told(message.build),
        groups=groups,
        backends=tuple(decode_fields(one, Backend, endpoint=one.endpoint or None) for one in message.backends),
        fingerprint_parts=decode_parts(message),
        grammars=decode_grammars(message),
        bits=told(message.bits),
    )
