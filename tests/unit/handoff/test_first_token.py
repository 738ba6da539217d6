"""What comes with the first token, and whose it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.errors import HandoffLost, InvalidRequest, NumericalError, Overloaded, RequestError
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Provenance, TokenLogprob
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Done, HandoffId, Open, StreamEnded
from jdisagg.sched.stops import find_stop, stop_ids
from tests.unit.handoff.rig import BPT, NEVER, decode_side, none_of, only, prefill_side, request

FULL = Output(
    request_id="r#1",
    attempt=0,
    token_ids=(42,),
    logprobs=(TokenLogprob(42, -0.5, ((42, -0.5), (7, -1.5))),),
    prompt_logprobs=(None, *(TokenLogprob(token_id, -3.0, ()) for token_id in range(2, 11))),
    cached_tokens=4,
    provenance=Provenance(prefill_worker="pid 1 @ p:1", prefilled_tokens=6),
)


def asked(name: str, attempt: int = 0, **sampling: Any) -> EngineRequest:
    plain = request(request_id=name)
    return replace(plain, attempt=attempt, sampling=replace(plain.sampling, **sampling))


def done(handoff: HandoffId, token: int) -> Done:
    """P's last word, under the id the request has there."""
    return Done(first=Output(request_id=f"{handoff.request_id}#{handoff.serial}", token_ids=(token,)), num_chunks=3)


def assert_lost(side: DecodeSide, one: EngineRequest, changes: dict[str, Any], cause: str) -> None:
    """What the first P says of token 42, with `changes`, is not told, and the next one is asked."""
    side.start(one, 0, ("p", "q"), 0.0)
    side.on_message(HandoffId("r", 1), Accepted(cached_tokens=0), 0.0)
    wrong = replace(Output(request_id="r#1", token_ids=(42,)), **changes)
    actions = side.on_message(HandoffId("r", 1), Done(first=wrong, num_chunks=3), 0.0)
    assert none_of(act.FirstToken, actions)
    assert only(act.Recovered, actions) == act.Recovered("other_prefill", "r", "p", "accepted", f"protocol: Done {cause}")
    assert only(act.OpenStream, actions).peer == "q"


@pytest.mark.covers("X04")
def test_all_that_p_knows_of_the_first_token_reaches_the_client_under_the_requests_own_name() -> None:
    prefill, decode = prefill_side(), decode_side(NEVER)
    opening = Open(request=asked("r", attempt=2, logprobs=2, prompt_logprobs=0), held_tokens=0, backend="fake")
    prefill.open(HandoffId("r", 1), opening, 0.0)
    prefill.on_admitted(HandoffId("r", 1), 0)
    last = only(act.Reply, prefill.on_first_token("r#1", FULL)).message
    assert isinstance(last, Done)
    assert last.first == replace(FULL, request_id="r", attempt=2)
    decode.start(asked("r", attempt=3, logprobs=2, prompt_logprobs=0), 0, ("p",), 0.0)
    decode.on_message(HandoffId("r", 1), Accepted(cached_tokens=4), 0.0)
    told = only(act.FirstToken, decode.on_message(HandoffId("r", 1), last, 0.0))
    assert (told.request_id, told.output) == ("r", replace(FULL, request_id="r", attempt=3))


@pytest.mark.covers("X04", "I-4")
def test_of_many_hand_offs_at_once_each_gets_its_own_token_and_none_of_an_older_stream() -> None:
    side = decode_side(NEVER)
    streams = [HandoffId(f"r{number}", number) for number in range(1, 65)]
    for handoff in streams:
        side.start(asked(handoff.request_id), 0, ("p", "q"), 0.0)
        side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
    again = {}
    for handoff in streams[::4]:
        lost = side.on_message(handoff, StreamEnded(reason="dead"), 0.0)
        again[handoff.request_id] = only(act.OpenStream, lost).handoff
    for handoff in streams:
        name, newest = handoff.request_id, again.get(handoff.request_id)
        of_first = side.on_message(handoff, done(handoff, 1000 + handoff.serial), 0.0)
        if newest is not None:
            assert of_first == [], "its stream is over"
            side.on_message(newest, Accepted(cached_tokens=0), 0.0)
            of_first = side.on_message(newest, done(newest, 1000 + handoff.serial), 0.0)
        told = only(act.FirstToken, of_first)
        assert (told.request_id, told.output.request_id, told.output.token_ids) == (name, name, (1000 + handoff.serial,))
    assert side.snapshot()["late"] == len(again) == 16


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NumericalError("NaN"), act.Fail),
        (InvalidRequest("its grammar cannot go on", field="grammar"), act.Fail),
        (InvalidRequest("no device"), act.OpenStream),
        (Overloaded("full"), act.OpenStream),
        (HandoffLost("no device"), act.OpenStream),
    ],
)
def test_an_error_in_the_place_of_a_token_is_taken_as_a_refusal(error: RequestError, kind: type) -> None:
    side, handoff = decode_side(NEVER), HandoffId("r", 1)
    side.start(asked("r"), 0, ("p", "q"), 0.0)
    side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
    failed = Done(first=Output(request_id="r#1", finish=FinishReason.ERROR, error=error), num_chunks=0)
    actions = side.on_message(handoff, failed, 50.0)
    assert none_of(act.FirstToken, actions)
    assert isinstance(only(kind, actions), kind)
    if kind is act.Fail:
        assert only(act.Fail, actions).error is error
        return
    assert only(act.OpenStream, actions).peer == "q"
    notes = [action for action in actions if isinstance(action, act.Recovered)]
    rung = act.Recovered("other_prefill", "r", "p", "accepted", "failed: no device", refused=isinstance(error, InvalidRequest))
    assert notes == ([] if isinstance(error, Overloaded) else [rung])
    assert side.tick(59.9) == [], "q has ten seconds to answer"


def test_once_the_token_was_delivered_the_next_worker_is_asked_for_kv_alone() -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", head_shards=4)
    sampling = replace(asked("r").sampling, stop_token_ids=(5,), logprobs=2, prompt_logprobs=1)
    wanted = replace(asked("r"), sampling=sampling, num_asked=2)
    opening = only(act.OpenStream, side.start(wanted, 0, ("p", "q"), 0.0)).message
    assert opening == Open(request=wanted, held_tokens=0, backend="fake", head_shards=4, max_piece_tokens=4)
    side.on_message(HandoffId("r", 1), Accepted(cached_tokens=0), 0.0)
    scores = FULL.prompt_logprobs
    first = Output(request_id="r#1", token_ids=(42,), logprobs=FULL.logprobs, prompt_logprobs=scores)
    side.on_message(HandoffId("r", 1), Done(first=first, num_chunks=3), 0.0)
    again = only(act.OpenStream, side.on_message(HandoffId("r", 1), StreamEnded(reason="dead"), 0.0)).message
    plain = replace(sampling, ignore_eos=True, stop_token_ids=(), logprobs=None, prompt_logprobs=None)
    assert again == replace(opening, request=replace(wanted, sampling=plain), goes_on=True)


@pytest.mark.parametrize("generated", [(), (7,)])
def test_who_has_some_of_the_answer_is_no_newcomer_at_a_prefill_worker(generated: tuple[int, ...]) -> None:
    side = decode_side(NEVER)
    opening = only(act.OpenStream, side.start(replace(asked("r"), generated_token_ids=generated), 0, ("p", "q"), 0.0)).message
    assert opening.goes_on is bool(generated)
    again = only(act.OpenStream, side.on_message(HandoffId("r", 1), StreamEnded(reason="dead"), 0.0)).message
    assert again == opening, "nothing more was told"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"token_ids": (100,)}, "with token 100, wanted one of [0, 100)"),
        ({"token_ids": (-1,)}, "with token -1, wanted one of [0, 100)"),
        ({"token_ids": (-1,), "finish": FinishReason.STOP}, "with token -1, wanted one of [0, 100)"),
        ({"token_ids": (42, 43)}, "with 2 tokens, wanted one at most"),
        ({"finish": FinishReason.ERROR}, "with finish 'error', and without an error"),
        ({"token_ids": (), "finish": FinishReason.ABORT}, "with finish 'abort', and without an error"),
        ({"token_ids": (), "finish": FinishReason.LENGTH}, "with finish 'length', 5 tokens before it"),
    ],
)
def test_a_first_token_that_cannot_be_one_is_not_told_and_the_next_worker_is_asked(changes: dict[str, Any], cause: str) -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100)
    assert_lost(side, asked("r"), changes, cause)


@pytest.mark.parametrize("token_id", [0, 99])
def test_the_first_and_the_last_token_of_the_vocabulary_are_told(token_id: int) -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100)
    side.start(asked("r"), 0, ("p", "q"), 0.0)
    side.on_message(HandoffId("r", 1), Accepted(cached_tokens=0), 0.0)
    actions = side.on_message(HandoffId("r", 1), done(HandoffId("r", 1), token_id), 0.0)
    assert only(act.FirstToken, actions).output.token_ids == (token_id,)


SCORED = (None, *(TokenLogprob(token_id, -3.0, ()) for token_id in range(2, 11)))
OF_42 = (TokenLogprob(42, -0.5, ()),)


@pytest.mark.parametrize(
    ("sampling", "changes", "cause"),
    [
        ({}, {"prompt_logprobs": SCORED[:2]}, "with 2 prompt_logprobs, wanted 0"),
        ({"prompt_logprobs": 1}, {"prompt_logprobs": SCORED[:9]}, "with 9 prompt_logprobs, wanted 10"),
        ({"prompt_logprobs": 0}, {}, "with 0 prompt_logprobs, wanted 10"),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": (None, None, *SCORED[2:])}, "without prompt_logprobs of token 1"),
        (
            {"prompt_logprobs": 0},
            {"prompt_logprobs": (*SCORED[:9], OF_42[0])},
            "with prompt_logprobs of token 42, wanted those of 10",
        ),
        ({}, {"logprobs": OF_42}, "with 1 logprobs, wanted 0"),
        ({"logprobs": 0}, {}, "with 0 logprobs, wanted 1"),
        ({"logprobs": 0}, {"logprobs": OF_42 * 2}, "with 2 logprobs, wanted 1"),
        ({"logprobs": 0}, {"logprobs": SCORED[2:3]}, "with logprobs of token 3, wanted those of 42"),
        ({"logprobs": 0}, {"logprobs": (None,)}, "without logprobs of token 0"),
    ],
)
def test_scores_that_nobody_asked_for_or_of_other_tokens_are_not_told(
    sampling: dict[str, int], changes: dict[str, Any], cause: str
) -> None:
    side = decode_side(NEVER)
    assert_lost(side, asked("r", **sampling), changes, cause)


def test_a_resumed_request_is_not_told_its_prompts_scores_again() -> None:
    side = decode_side(NEVER)
    resumed = replace(asked("r", prompt_logprobs=1), generated_token_ids=(7,))
    side.start(resumed, 0, ("p",), 0.0)
    side.on_message(HandoffId("r", 1), Accepted(cached_tokens=0), 0.0)
    actions = side.on_message(HandoffId("r", 1), done(HandoffId("r", 1), 42), 0.0)
    assert only(act.FirstToken, actions).output.token_ids == (42,)


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampling", "changes", "cause"),
    [
        ({}, {"finish": STOP}, "with token 42 and finish 'stop', wanted no finish"),
        ({}, {"finish": STOP, "stop_token_id": 42}, "with token 42 and finish 'stop' by token 42, wanted no finish"),
        ({}, {"finish": STOP, "stop_token_id": 5}, "with token 42 and finish 'stop' by token 5, wanted no finish"),
        ({}, {"token_ids": (), "finish": STOP}, "with 0 tokens, wanted 1"),
        ({}, {"stop_token_id": 42}, "with token 42 and no finish by token 42, wanted no finish"),
        ({}, {"token_ids": (5,)}, "with token 5 and no finish, wanted finish 'stop' by token 5"),
        ({}, {"token_ids": (5,), "finish": STOP}, "with token 5 and finish 'stop', wanted finish 'stop' by token 5"),
        (
            {"ignore_eos": True},
            {"token_ids": (5,), "finish": STOP, "stop_token_id": 5},
            "with token 5 and finish 'stop' by token 5, wanted no finish",
        ),
        (
            {"min_tokens": 2},
            {"token_ids": (5,), "finish": STOP, "stop_token_id": 5},
            "with token 5 and finish 'stop' by token 5, wanted no finish",
        ),
        ({"stop_token_ids": (42,)}, {}, "with token 42 and no finish, wanted finish 'stop' by token 42"),
        (
            {"max_tokens": 1},
            {"finish": STOP, "stop_token_id": 42},
            "with token 42 and finish 'stop' by token 42, wanted finish 'length'",
        ),
        ({"max_tokens": 1}, {"token_ids": (), "finish": LENGTH}, "with 0 tokens, wanted 1"),
        ({"max_tokens": 0}, {"finish": LENGTH}, "with 1 tokens, wanted 0"),
    ],
)
def test_an_end_that_the_token_is_not_or_one_that_goes_unsaid_is_not_told(
    sampling: dict[str, Any], changes: dict[str, Any], cause: str
) -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100, eos_token_ids=(5,))
    assert_lost(side, asked("r", **sampling), changes, cause)


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        ({}, {"token_ids": (5,), "finish": STOP, "stop_token_id": 5}),
        ({"ignore_eos": True}, {"token_ids": (5,)}),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, {"token_ids": (5,), "finish": STOP, "stop_token_id": 5}),
        ({"stop_token_ids": (42,)}, {"finish": STOP, "stop_token_id": 42}),
        ({"stop_token_ids": (42,), "min_tokens": 2}, {}),
        ({"max_tokens": 2}, {}),
        ({"max_tokens": 1}, {"finish": LENGTH}),
        ({"max_tokens": 1}, {"token_ids": (5,), "finish": STOP, "stop_token_id": 5}),
        ({"max_tokens": 1, "ignore_eos": True}, {"token_ids": (5,), "finish": LENGTH}),
        ({"max_tokens": 0}, {"token_ids": (), "finish": LENGTH}),
        ({"max_tokens": 0, "logprobs": 1}, {"token_ids": (), "finish": LENGTH}),
    ],
)
def test_the_end_that_the_token_is_is_told(sampling: dict[str, Any], changes: dict[str, Any]) -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100, eos_token_ids=(5,))
    side.start(asked("r", **sampling), 0, ("p", "q"), 0.0)
    side.on_message(HandoffId("r", 1), Accepted(cached_tokens=0), 0.0)
    right = replace(Output(request_id="r#1", token_ids=(42,)), **changes)
    actions = side.on_message(HandoffId("r", 1), Done(first=right, num_chunks=3), 0.0)
    assert only(act.FirstToken, actions).output == replace(right, request_id="r")


def test_the_tokens_of_a_resumed_request_count() -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100, eos_token_ids=(5,))
    side.start(replace(asked("r", min_tokens=2, max_tokens=3), generated_token_ids=(7, 8)), 0, ("p",), 0.0)
    side.on_message(HandoffId("r", 1), Accepted(cached_tokens=0), 0.0)
    last = Output(request_id="r#1", token_ids=(5,), finish=STOP, stop_token_id=5)
    assert only(act.FirstToken, side.on_message(HandoffId("r", 1), Done(first=last, num_chunks=0), 0.0)).output.finish is STOP


@pytest.mark.parametrize("eos_of_p", [(), (5,), (42,), (7, 42)])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"ignore_eos": True}, {"stop_token_ids": (42,)}, {"stop_token_ids": (5, 7), "ignore_eos": True}, {"min_tokens": 2}],
)
def test_what_ends_a_request_at_p_is_d_s_to_say(sampling: dict[str, Any], eos_of_p: tuple[int, ...]) -> None:
    """`sampling` with EOS ignored is for whoever asked for that: P's own EOS must not end it, either."""
    eos = (5, 6)
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100, eos_token_ids=eos)
    wanted = asked("r", **sampling)
    told = only(act.OpenStream, side.start(wanted, 0, ("p",), 0.0)).message.request
    for token_id in (5, 6, 7, 42, 50):
        at_p = find_stop(token_id, 1, told.sampling, stop_ids(told.sampling, eos_of_p))
        assert at_p == find_stop(token_id, 1, wanted.sampling, stop_ids(wanted.sampling, eos)), f"token {token_id}"
    assert replace(told, sampling=wanted.sampling) == wanted


def test_an_eos_beyond_the_vocabulary_which_never_comes_has_no_prompt_refused() -> None:
    side = DecodeSide(NEVER, chunk_bytes_per_token=BPT, backend="fake", vocab_size=100, eos_token_ids=(99, 100))
    sampling = only(act.OpenStream, side.start(asked("r"), 0, ("p",), 0.0)).message.request.sampling
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (99,))
