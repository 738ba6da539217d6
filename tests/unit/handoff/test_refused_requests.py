"""Requests that a prefill worker finds wrong: whose fault that is, and whether another one is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    HandoffLost,
    InvalidRequest,
    ModelNotFound,
    NumericalError,
    RequestError,
    Unavailable,
)
from jdisagg.core.requests import Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Done, HandoffId, Refused, StreamEnded
from tests.unit.handoff.rig import DEAD, H2, NEVER, H, decode_side, none_of, only, request


@pytest.mark.parametrize("error", [NumericalError("NaN"), DeadlineExceeded("late")])
@pytest.mark.covers("P02")
def test_an_error_that_would_come_back_everywhere_ends_the_request_with_it(error: RequestError) -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    actions = side.on_message(H, Refused(error=error), 0.0)
    assert only(act.Fail, actions).error is error
    assert act.CloseStream(H) in actions
    assert side.is_idle


@pytest.mark.parametrize("answer", [Refused(error=InvalidRequest("its pool is 8 tokens")), "Done"])
def test_a_stream_that_has_outgrown_every_prefill_worker_is_lost_and_not_its_client_s_fault(answer: Refused | str) -> None:
    side = decode_side(NEVER)
    side.start(replace(request(), generated_token_ids=(7, 8)), 0, ("p",), 0.0)
    error = InvalidRequest("its pool is 8 tokens")
    message = answer if isinstance(answer, Refused) else Done(first=Output(request_id="r", error=error), num_chunks=0)
    if message is not answer:
        side.on_message(H, Accepted(cached_tokens=0), 0.0)
    failed = only(act.Fail, side.on_message(H, message, 1.0)).error
    assert isinstance(failed, HandoffLost)
    assert "12 tokens, are more than any prefill worker takes (its pool is 8 tokens)" in failed.message
    assert "; give prefill workers the pages and --max-model-len of the decode workers, or allow local" in failed.message


@pytest.mark.parametrize(
    "error", [InvalidRequest("its context is 8 tokens"), ContextLengthExceeded("short"), ModelNotFound("it serves another one")]
)
@pytest.mark.covers("P02")
def test_a_worker_for_which_the_request_is_wrong_is_like_one_that_failed(error: RequestError) -> None:
    side = decode_side()
    side.start(request(), 0, ("short", "q"), 0.0)
    actions = side.on_message(H, Refused(error=error), 0.0)
    noted = act.Recovered("other_prefill", "r", "short", "opening", f"refused: {error}", refused=True)
    assert only(act.Recovered, actions) == noted
    assert (only(act.OpenStream, actions).peer, act.CloseStream(H) in actions) == ("q", True)
    local = side.on_message(H2, StreamEnded(reason="unreachable", error=error), 0.0)
    assert only(act.ComputeLocally, local).provenance.recoveries == ("other_prefill", "local_prefill")
    assert only(act.Recovered, local).refused
    assert side.is_idle


@pytest.mark.parametrize("peers", [("p",), ("p", "q")])
def test_a_request_that_is_wrong_for_everybody_ends_with_what_the_last_one_says(peers: tuple[str, ...]) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, peers, 0.0)
    errors = [InvalidRequest(f"the context of {peer} is short") for peer in peers]
    actions: list[act.DecodeAction] = []
    for serial, error in enumerate(errors, 1):
        assert none_of(act.Fail, actions)
        actions = side.on_message(HandoffId("r", serial), Refused(error=error), 0.0)
    assert only(act.Fail, actions).error is errors[-1], "at once: nobody is asked a second time"
    assert side.is_idle


@pytest.mark.parametrize("other", [InvalidRequest("short"), Unavailable("no backend in common", field="kv_transfer_backend")])
def test_a_worker_whose_settings_forbid_it_is_not_asked_again_and_does_not_blame_the_request(other: RequestError) -> None:
    side, unlike = decode_side(NEVER), Unavailable("no backend in common", field="kv_transfer_backend")
    side.start(request(), 0, ("p", "q"), 0.0)
    assert only(act.OpenStream, side.on_message(H, Refused(error=unlike), 0.0)).peer == "q"
    failed = only(act.Fail, side.on_message(H2, Refused(error=other), 0.0)).error
    assert isinstance(failed, Unavailable), "at once, as what the operator can mend"
    assert side.is_idle


@pytest.mark.parametrize(
    "answers", [(Refused(error=InvalidRequest("short")), DEAD), (DEAD, Refused(error=InvalidRequest("short")))]
)
def test_a_request_is_not_called_wrong_while_one_who_was_lost_might_have_served_it(
    answers: tuple[Refused | StreamEnded, ...],
) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, answers[0], 0.0)
    assert isinstance(only(act.Fail, side.on_message(H2, answers[1], 0.0)).error, HandoffLost)
