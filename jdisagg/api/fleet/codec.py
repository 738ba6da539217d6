"""Between the protos of the fleet and `jdisagg.core.fleet`: loads and members."""

from __future__ import annotations

from jdisagg.api.peer.identity_codec import decode_parts, encode_parts
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.fleet import Load, Member, ModelCard, Report, Standing
from jdisagg.core.requests import Role
from jdisagg.core.told import told
from jdisagg.v1 import fleet_pb2, peer_pb2, worker_pb2


def encode_load(load: Load) -> worker_pb2.Load:
    """Field by field."""
    return worker_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        pending_prefill_tokens=load.pending_prefill_tokens,
    )


def decode_load(message: worker_pb2.Load) -> Load:
    """Field by field."""
    return Load(
        running=message.running,
        waiting=message.waiting,
        free_pages=message.free_pages,
        total_pages=message.total_pages,
        pending_prefill_tokens=message.pending_prefill_tokens,
    )


def encode_report(member: Member, report: Report) -> fleet_pb2.HeartbeatRequest:
    """A heartbeat of `member`."""
    return fleet_pb2.HeartbeatRequest(
        address=member.address,
        epoch=member.epoch,
        load=encode_load(report.load),
        draining=report.draining,
        not_ready=report.not_ready,
        alone=report.alone,
    )


def decode_report(message: fleet_pb2.HeartbeatRequest) -> Report:
    """Field by field."""
    return Report(decode_load(message.load), message.draining, told(message.not_ready), message.alone)


def encode_member(member: Member) -> fleet_pb2.Member:
    """What a router needs to know of a worker; the rest of Identity is between P and D."""
    return fleet_pb2.Member(
        role=member.role.value,
        address=member.address,
        identity=peer_pb2.Identity(
            fingerprint=member.card.fingerprint,
            fingerprint_parts=encode_parts(member.fingerprint_parts),
            worker=member.worker,
            epoch=member.epoch,
            grammars=member.grammars,
            bits=member.bits,
        ),
        model=member.card.name,
        max_model_len=member.card.max_model_len,
        vocab_size=member.card.vocab_size,
        eos_token_ids=member.card.eos_token_ids,
        load=encode_load(member.load),
        draining=member.draining,
        needs_prefill=member.needs_prefill,
        text_digest=member.text_digest,
        cache_tokens=member.cache_tokens,
        not_ready=member.not_ready,
        alone=member.alone,
    )


def decode_member(message: fleet_pb2.Member) -> Member:
    """Raises InvalidRequest for an unknown role or a member without address, epoch or fingerprint."""
    roles = {role.value: role for role in Role}
    if message.role not in roles:
        raise InvalidRequest(f"member role: wanted one of {sorted(roles)}, got {message.role!r}", field="role")
    for name, value in (
        ("address", message.address), ("epoch", message.identity.epoch), ("fingerprint", message.identity.fingerprint)
    ):  # fmt: skip
        if not value:
            raise InvalidRequest(f"member {message.address or message.identity.worker!r}: {name} is empty", field=name)
    return Member(
        role=roles[message.role],
        address=message.address,
        worker=told(message.identity.worker),
        epoch=message.identity.epoch,
        card=ModelCard(
            name=message.model,
            max_model_len=message.max_model_len,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            fingerprint=message.identity.fingerprint,
        ),
        fingerprint_parts=decode_parts(message.identity),
        load=decode_load(message.load),
        draining=message.draining,
        grammars=message.identity.grammars,
        bits=told(message.identity.bits),
        needs_prefill=message.needs_prefill,
        text_digest=message.text_digest,
        cache_tokens=max(0, message.cache_tokens),
        not_ready=told(message.not_ready),
        alone=message.alone,
    )


def encode_standing(standing: Standing) -> fleet_pb2.Standing:
    """Field by field."""
    return fleet_pb2.Standing(state=standing.state.value, why=standing.why, requests=standing.requests)
