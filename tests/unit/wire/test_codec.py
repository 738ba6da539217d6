"""Everything that crosses the wire comes back equal."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.api import codec
from jdisagg.api.fleet import codec as fleet_codec
from jdisagg.api.peer import codec as peer_codec
from jdisagg.api.peer import identity_codec
from jdisagg.core import errors
from jdisagg.core.fleet import Load, ProcessFacts, Report
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Provenance, SamplingParams, TokenLogprob
from jdisagg.core.speed import Speed
from jdisagg.handoff.identity import Backend, CacheGroup, Identity
from jdisagg.handoff.ladder import is_final
from jdisagg.handoff.messages import (
    Accepted,
    Ack,
    ChunkReady,
    Declined,
    Done,
    Grant,
    Lending,
    Open,
    Parked,
    Refused,
    Started,
    Want,
)
from jdisagg.kv.spec import KVSpec
from jdisagg.v1 import common_pb2, fleet_pb2, peer_pb2
from tests.unit.wire.rig import member

NOW_S = 1000.0
TOKEN = st.integers(0, 2**31 - 1)
TOKENS = st.lists(TOKEN, max_size=6).map(tuple)
F32 = st.floats(-100, 100, width=32)
COUNTED = ("_tokens", "_pages", "_bytes")
COUNT = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)  # what cannot be printed does not stay as it is
SAMPLING = st.builds(
    SamplingParams,
    temperature=F32,
    top_k=st.none() | COUNT,
    top_p=F32,
    min_p=F32,
    repetition_penalty=F32,
    presence_penalty=F32,
    frequency_penalty=F32,
    logit_bias=st.dictionaries(TOKEN, F32, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    seed=st.integers(0, 2**32 - 1),
    max_tokens=COUNT,
    min_tokens=COUNT,
    ignore_eos=st.booleans(),
    stop_token_ids=TOKENS,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
REQUEST = st.builds(
    EngineRequest,
    request_id=st.text(min_size=1, max_size=8),
    prompt_token_ids=st.lists(TOKEN, min_size=1, max_size=6).map(tuple),
    sampling=SAMPLING,
    deadline_s=st.integers(0, 10**6).map(lambda ms: NOW_S + ms / 1000),
    generated_token_ids=TOKENS,
    attempt=COUNT,
    choice=COUNT,
    priority=st.integers(-5, 5),
    cache_salt=TEXT,
    prefill_peers=st.lists(TEXT, max_size=3).map(tuple),
    traceparent=st.sampled_from(["", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]),
)
LOGPROB = st.builds(TokenLogprob, TOKEN, F32, st.lists(st.tuples(TOKEN, F32), max_size=3).map(tuple))
PROVENANCE = st.builds(
    Provenance,
    prefill_worker=TEXT,
    decode_worker=TEXT,
    prefilled_tokens=COUNT,
    transferred_tokens=COUNT,
    transferred_pages=COUNT,
    transferred_bytes=st.integers(0, peer_codec.MOST_COUNTED),
    borrowed_tokens=COUNT,
    borrowed_bytes=st.integers(0, peer_codec.MOST_COUNTED),
    recoveries=st.lists(TEXT, max_size=3).map(tuple),
)
OUTPUT = st.builds(
    Output,
    request_id=TEXT,
    attempt=COUNT,
    token_ids=TOKENS,
    logprobs=st.none() | st.lists(LOGPROB, min_size=1, max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROB, min_size=1, max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | TOKEN,
    cached_tokens=COUNT,
    provenance=st.none() | PROVENANCE,
)
WANT = st.builds(Want, begin=COUNT, end=COUNT, reason=TEXT, group=COUNT, backend=TEXT, piece_tokens=COUNT)
CHUNK = st.builds(
    ChunkReady,
    key=TEXT,
    begin=COUNT,
    end=COUNT,
    shape=st.tuples(COUNT, COUNT, COUNT, COUNT),
    dtype=TEXT,
    num_bytes=st.integers(0, 2**62),
    checksum=st.integers(0, 2**64 - 1),
    group=COUNT,
    backend=TEXT,
    locator=TEXT,
)
GRANT = st.builds(Grant, credit_bytes=st.integers(0, 2**62))
ACK = st.builds(Ack, key=TEXT)
LENDING = st.none() | st.builds(Lending, address=TEXT, backend=TEXT, dtype=TEXT)
DOWN = st.one_of(
    st.builds(
        Open,
        request=REQUEST,
        held_tokens=COUNT,
        backend=TEXT,
        backends=st.lists(TEXT, max_size=3).map(tuple),
        head_shards=st.integers(1, 64),
        lending=LENDING,
        goes_on=st.booleans(),
    ),
    st.builds(Open, request=REQUEST, held_tokens=COUNT, backend=TEXT, max_piece_tokens=st.none() | st.integers(1, 2**31 - 1)),
    GRANT,
    ACK,
    WANT,
    CHUNK,
    st.builds(Declined, reason=TEXT),
)
UP = st.one_of(
    st.builds(Accepted, cached_tokens=COUNT),
    st.just(Started()),
    st.just(Parked()),
    CHUNK,
    st.builds(Done, first=OUTPUT, num_chunks=COUNT),
    WANT,
    GRANT,
    ACK,
)


def same_request(ours: EngineRequest, theirs: EngineRequest) -> bool:
    exact = EngineRequest.__dataclass_fields__.keys() - {"deadline_s"}
    return all(getattr(ours, name) == getattr(theirs, name) for name in exact) and math.isclose(
        ours.deadline_s, theirs.deadline_s, abs_tol=0.0011
    )


@given(REQUEST)
def test_request_round_trip(request):
    message = common_pb2.EngineRequest.FromString(codec.encode_request(request, NOW_S).SerializeToString())
    assert same_request(request, codec.decode_request(message, NOW_S))


@pytest.mark.covers("X04")
@given(OUTPUT)
def test_output_round_trip(output):
    assert codec.decode_output(common_pb2.Output.FromString(codec.encode_output(output).SerializeToString())) == output


@given(DOWN)
def test_messages_to_prefill_round_trip(message):
    wire = peer_pb2.PrefillRequest.FromString(peer_codec.encode_down(message, epoch="e", now_s=NOW_S).SerializeToString())
    back = peer_codec.decode_down(wire, NOW_S)
    if isinstance(message, Open):
        assert isinstance(back, Open)
        assert same_request(message.request, back.request)
        assert (message.held_tokens, message.backend, message.lending) == (back.held_tokens, back.backend, back.lending)
        assert (message.backends, message.head_shards, message.goes_on) == (back.backends, back.head_shards, back.goes_on)
        assert wire.open.epoch == "e"
    else:
        assert back == message


@given(UP)
def test_messages_to_decode_round_trip(message):
    assert (
        peer_codec.decode_up(peer_pb2.PrefillResponse.FromString(peer_codec.encode_up(message).SerializeToString())) == message
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("bad top_p", field="top_p"),
        errors.ModelNotFound("no such model"),
        errors.Unauthenticated("no key"),
        errors.Overloaded("full", retry_after_s=2.5),
        errors.Unavailable("draining"),
        errors.DeadlineExceeded("late"),
        errors.Cancelled("gone"),
        errors.HandoffLost("every rung failed"),
        errors.Deadly("every rung failed; they may have died of it", num_down=4),
        errors.ContextLengthExceeded("prompt of 9 tokens", field="prompt"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_keeps_class_text_field_and_delay(error):
    refused = peer_codec.decode_up(peer_codec.encode_up(Refused(error=error)))
    assert isinstance(refused, Refused)
    back = refused.error
    assert type(back) is type(error)
    assert vars(back) == vars(error)


def test_unknown_numbers_have_a_meaning():
    error = codec.decode_error(common_pb2.RequestFailure(code=77, message="from the future"))
    assert (type(error), error.grpc_status) == (errors.RequestError, "INTERNAL")
    assert codec.decode_output(common_pb2.Output(request_id="a", finish=99)).finish is FinishReason.ERROR  # pyright: ignore
    assert peer_codec.decode_up(peer_pb2.PrefillResponse()) is None
    numerical = codec.decode_error(codec.encode_error(errors.NumericalError("NaN at step 3, layer 1")))
    assert (numerical.grpc_status, numerical.message) == ("INTERNAL", "NaN at step 3, layer 1")
    assert type(codec.decode_error(common_pb2.RequestFailure(code=5, too_long=True))) is errors.ModelNotFound


def test_a_prompt_whose_logits_are_no_numbers_is_tried_nowhere_else() -> None:
    refused = peer_codec.encode_up(Refused(error=errors.NumericalError("NaN at step 3, layer 1")))
    decoded = peer_codec.decode_up(peer_pb2.PrefillResponse.FromString(refused.SerializeToString()))
    assert isinstance(decoded, Refused)
    assert is_final(decoded.error)
    assert decoded.error.reason == "numerical", "and a decode worker and its router count it as what it is"


@pytest.mark.covers("I-5")
@pytest.mark.parametrize("left_s", [-5.0, 0.0, 0.0004, 2.5, math.inf])
def test_deadline_travels_as_remaining_milliseconds(left_s):
    request = EngineRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=NOW_S + left_s)
    back = codec.decode_request(codec.encode_request(request, NOW_S), now_s=50.0)
    expected = min(max(left_s, 0.0), 30 * 86_400.0)
    assert expected <= back.deadline_s - 50.0 <= expected + 0.001 + 1e-6


def test_empty_prompt_is_refused_with_its_field():
    with pytest.raises(errors.InvalidRequest, match="prompt_token_ids is empty") as caught:
        codec.decode_request(common_pb2.EngineRequest(request_id="a"), NOW_S)
    assert caught.value.field == "prompt"


def test_identity_round_trip():
    spec = KVSpec(num_layers=2, num_kv_heads=4, features=64, dtype="bfloat16", kind="window", window=128)
    identity = Identity(
        fingerprint="f",
        fingerprint_parts=(("model.num_layers", "2"), ("numerics", "exact")),
        bits="48-aa",
        worker="pid 1 @ a:1",
        epoch="e",
        groups=(CacheGroup(spec=spec, page_size=16),),
        backends=(Backend(name="jax", version="0.10", num_transport_addresses=4), Backend(name="tcp", endpoint="[::1]:80")),
        build="b",
        min_protocol=1,
        max_protocol=3,
    )
    wire = peer_pb2.Identity.FromString(identity_codec.encode_identity(identity).SerializeToString())
    assert identity_codec.decode_identity(wire) == identity


def test_member_round_trip_and_refusals():
    described = member(
        fingerprint_parts=(("model.num_layers", "2"), ("numerics", "exact")),
        bits="48-aa",
        name="demo",
        eos_token_ids=(2, 3),
        load=Load(running=1, waiting=2, free_pages=3, total_pages=4, pending_prefill_tokens=5, speed=Speed(1.5, 2.5)),
        draining=True,
        not_ready="no usable prefill worker",
        alone=True,
        cache_tokens=1 << 33,
        process=ProcessFacts(build="1.2", http_address="a:8000", uptime_s=7),
    )
    wire = fleet_codec.encode_member(described)
    assert fleet_codec.decode_member(wire) == described
    wire.role = "janitor"
    with pytest.raises(errors.InvalidRequest, match="janitor"):
        fleet_codec.decode_member(wire)


def test_report_round_trip() -> None:
    for report in (Report(Load(running=1)), Report(Load(waiting=2), draining=True, not_ready="gone", alone=True, uptime_s=9)):
        wire = fleet_codec.encode_report(member(), report)
        assert fleet_codec.decode_report(fleet_pb2.HeartbeatRequest.FromString(wire.SerializeToString())) == report


def test_no_count_of_an_output_is_below_zero() -> None:
    """A router adds them to what it knows of a worker's cache."""
    counts = {field.name: -(2**30) for field in common_pb2.Provenance.DESCRIPTOR.fields if field.name.endswith(COUNTED)}
    assert len(counts) == 6
    provenance = codec.decode_output(common_pb2.Output(request_id="r", provenance=common_pb2.Provenance(**counts))).provenance
    assert provenance == Provenance()
