"""Between the protos of the fleet and `jdisagg.core.fleet`: loads and members."""

from __future__ import annotations

from jdisagg.api.codec import decode_fields, decode_speed, encode_fields, encode_speed
from jdisagg.api.peer.identity_codec import decode_grammars, decode_parts, encode_grammars, encode_parts
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.fleet import Load, LostWorker, Member, ModelCard, ProcessFacts, Report, Standing
from jdisagg.core.requests import Role
from jdisagg.core.told import told
from jdisagg.v1 import fleet_pb2, peer_pb2, worker_pb2


def encode_load(load: Load) -> worker_pb2.Load:
    """Field by field."""
    return encode_fields(load, worker_pb2.Load, speed=encode_speed(load.speed))


def decode_load(message: worker_pb2.Load) -> Load:
    """Field by field."""
    return decode_fields(message, Load, speed=decode_speed(message.speed))


def encode_report(member: Member, report: Report) -> fleet_pb2.HeartbeatRequest:
    """A heartbeat of `member`."""
    load = encode_load(report.load)
    return encode_fields(report, fleet_pb2.HeartbeatRequest, address=member.address, epoch=member.epoch, load=load)


def decode_report(message: fleet_pb2.HeartbeatRequest) -> Report:
    """Field by field."""
    return decode_fields(message, Report, text=told, load=decode_load(message.load))


def encode_member(member: Member) -> fleet_pb2.Member:
    """What a router needs to know of a worker; the rest of Identity is between P and D."""
    card, process, parts = member.card, member.process, encode_parts(member.fingerprint_parts)
    said = {"build": process.build, "fingerprint": card.fingerprint, "fingerprint_parts": parts}
    said |= encode_grammars(member.grammars)
    return encode_fields(
        member,
        fleet_pb2.Member,
        role=member.role.value,
        identity=encode_fields(member, peer_pb2.Identity, **said),
        http_address=process.http_address,
        uptime_s=process.uptime_s,
        model=card.name,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        load=encode_load(member.load),
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
    identity = message.identity
    return decode_fields(
        message,
        Member,
        role=roles[message.role],
        worker=told(identity.worker),
        epoch=identity.epoch,
        process=decode_fields(message, ProcessFacts, text=told, build=told(identity.build), uptime_s=max(0, message.uptime_s)),
        card=decode_fields(message, ModelCard, name=message.model, fingerprint=identity.fingerprint),
        fingerprint_parts=decode_parts(identity),
        load=decode_load(message.load),
        grammars=decode_grammars(identity),
        bits=told(identity.bits),
        cache_tokens=max(0, message.cache_tokens),
        not_ready=told(message.not_ready),
    )


def encode_standing(standing: Standing) -> fleet_pb2.Standing:
    """Its state as a word."""
    return encode_fields(standing, fleet_pb2.Standing, state=standing.state.value)


def encode_lost(lost: LostWorker) -> fleet_pb2.LostWorker:
    """Its age in whole milliseconds."""
    return encode_fields(lost, fleet_pb2.LostWorker, role=lost.role.value, ago_ms=round(lost.ago_s * 1000))
