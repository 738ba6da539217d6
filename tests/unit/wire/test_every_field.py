"""What is read of a message is written, too: a field is sent because its dataclass names it alike, and not at all otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from jdisagg.api.codec import encode_request, encode_sampling
from jdisagg.api.fleet.codec import decode_report, encode_load, encode_member, encode_report
from jdisagg.api.peer.codec import encode_down, encode_up
from jdisagg.api.peer.identity_codec import encode_identity
from tests.compat.samples import CORE, FILES, NOW_S, samples
from tests.unit.wire.rig import member

ELSEWHERE = {"PrefillResponse.done", "PrefillResponse.refused"}  # an error is written as fits its type; see test_codec
WRITE: dict[str, Callable[[Any, Any], Message]] = {
    "SamplingParams": lambda value, _: encode_sampling(value),
    "EngineRequest": lambda value, _: encode_request(value, NOW_S),
    "Load": lambda value, _: encode_load(value),
    "Identity": lambda value, _: encode_identity(value),
    "Member": lambda value, _: encode_member(value),
    "HeartbeatRequest": lambda value, message: encode_report(member(address=message.address, epoch=message.epoch), value),
    "PrefillRequest": lambda value, message: encode_down(
        value, epoch=message.open.epoch, now_s=NOW_S, pulse=message.open.pulse
    ),
    "PrefillResponse": lambda value, _: encode_up(value),
}
READ: dict[str, Callable[[Any], object]] = CORE | {"HeartbeatRequest": decode_report}
BETWEEN_P_AND_D = ("min_protocol", "max_protocol", "build", "groups", "ranks", "backends")  # no router's business
SAMPLES = {name: message for file in FILES for name, message in samples(file) if name.partition(".")[0] in WRITE}


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - ELSEWHERE))
def test_what_is_read_of_a_message_with_all_its_fields_is_written_again(name: str) -> None:
    kind, message = name.partition(".")[0], SAMPLES[name]
    if kind == "Member":
        for field in BETWEEN_P_AND_D:
            message.identity.ClearField(field)
    if kind == "Identity":
        message.ClearField("ranks")  # neither sent nor read
    value = READ[kind](message)
    if name.endswith(".heartbeat"):
        assert value is None
    else:
        assert WRITE[kind](value, message) == message
