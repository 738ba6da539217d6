"""Refusals: the field at fault, the whole message, and that its advice works, to the last token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from jdisagg.core.requests import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Role
from jdisagg.sched.intake import Limits, check_config, check_request
from tests.unit.sched.engine_fake import EOS, request

LIMITS = Limits(role=Role.UNIFIED, max_model_len=64, page_size=4, num_usable_pages=10, eos_token_ids=(EOS,))
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
INT32 = 2**31 - 1


@pytest.mark.parametrize(
    ("bad", "field", "message"),
    [
        (request("a", ()), "prompt", "the prompt has no token; send at least one"),
        (request("a", (1,), -1), "max_tokens", "max_tokens is -1 with min_tokens 0; use max_tokens >= min_tokens >= 0"),
        (
            request("a", (1,), 2, min_tokens=3),
            "max_tokens",
            "max_tokens is 2 with min_tokens 3; use max_tokens >= min_tokens >= 0",
        ),
        (request("a", (1,), 2, generated=(1, 2, 3)), "max_tokens", "3 tokens are generated already, max_tokens is 2"),
        (
            request("a", (0, 5, -3), 2),
            "prompt",
            f"prompt: ids must be in [0, {INT32}), the model's vocabulary; got -3",
        ),
        (
            request("a", (1,), 2, generated=(0, INT32)),
            "generated_token_ids",
            f"generated_token_ids: ids must be in [0, {INT32}), the model's vocabulary; got {INT32}",
        ),
        (
            request("a", (1,), 2, stop_token_ids=(-1,)),
            "stop_token_ids",
            f"stop_token_ids: ids must be in [0, {INT32}), the model's vocabulary; got -1",
        ),
        (
            request("a", (1,), 2, stop_token_ids=tuple(range(1, MAX_STOP_TOKEN_IDS + 1))),
            "stop_token_ids",
            f"stop_token_ids: {MAX_STOP_TOKEN_IDS + 1} with the model's own; use at most {MAX_STOP_TOKEN_IDS}",
        ),
        (request("a", (1,) * 3, INT32), "max_tokens", f"max_tokens: got {INT32}, use {INT32 - 3}"),
        (request("a", (1,), 2, logprobs=-1), "logprobs", f"logprobs: must be in [0, {MAX_LOGPROBS}]; got -1"),
        (
            request("a", (1,), 2, prompt_logprobs=MAX_LOGPROBS + 1),
            "prompt_logprobs",
            f"prompt_logprobs: must be in [0, {MAX_LOGPROBS}]; got {MAX_LOGPROBS + 1}",
        ),
        (
            request("a", (1,) * 50, 15),
            "max_tokens",
            "prompt of 50 tokens with max_tokens 15 needs room for 65 tokens; the model's context length is 64 tokens: "
            "use max_tokens <= 14",
        ),
        (
            request("a", (1,) * 64, 1),
            "prompt",
            "prompt of 64 tokens with max_tokens 1 needs room for 65 tokens; the model's context length is 64 tokens: "
            "shorten the prompt to 63 tokens or fewer",
        ),
        (
            request("a", (1,) * 30, 12),
            "max_tokens",
            "prompt of 30 tokens with max_tokens 12 needs room for 41 tokens; this worker's KV pool holds 40 tokens: "
            "use max_tokens <= 10",
        ),
    ],
)
def test_a_refusal_names_field_figures_and_remedy(bad: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(bad, LIMITS)
    assert (caught.value.field, caught.value.message) == (field, message)


TIGHT = [
    ({"max_model_len": 8}, "the prefill worker's context length is 8 tokens"),
    ({"num_usable_pages": 2}, "the prefill worker's KV pool holds 8 tokens"),
    ({"read_tokens": 8}, "one step of the prefill worker reads 8 tokens"),
]


@pytest.mark.parametrize(("limits", "what"), TIGHT)
def test_a_prefill_worker_takes_a_prompt_that_fills_it_to_the_last_token_and_says_so(limits: dict[str, int], what: str) -> None:
    tight = replace(LIMITS, role=Role.PREFILL, **limits)
    with pytest.raises(ContextLengthExceeded) as caught:
        check_request(request("a", (1,) * 9, 1000), tight)
    told = f"prompt of 9 tokens; {what}: shorten the prompt to 8 tokens or fewer"
    assert (caught.value.field, caught.value.message) == ("prompt", told)
    check_request(request("a", (1,) * 8, 1000), tight)


@pytest.mark.parametrize(("limits", "what"), TIGHT)
def test_a_prefill_worker_counts_what_is_known_and_no_output(limits: dict[str, int], what: str) -> None:
    tight = replace(LIMITS, role=Role.PREFILL, **limits)
    with pytest.raises(ContextLengthExceeded) as caught:
        check_request(request("a", (1,) * 6, 1000, generated=(1,) * 3), tight)
    told = f"prompt of 6 tokens with 3 of its answer; {what}"
    assert (caught.value.field, caught.value.message) == ("prompt", told), "nobody can shorten what was generated"
    check_request(request("a", (1,) * 6, 1000, generated=(1,) * 2), tight)


def test_a_step_that_reads_too_little_for_the_last_token_is_a_refusal() -> None:
    tight = replace(LIMITS, read_tokens=20)
    check_request(request("a", (1,) * 10, 11), tight)
    with pytest.raises(InvalidRequest) as caught:
        check_request(request("a", (1,) * 10, 12), tight)
    assert caught.value.message == (
        "prompt of 10 tokens with max_tokens 12 needs room for 21 tokens; one step of this worker reads 20 tokens: "
        "use max_tokens <= 10"
    )


def test_lookahead_needs_room_beside_the_output() -> None:
    ahead = replace(LIMITS, num_lookahead=1)
    check_request(request("a", (1,) * 30, 10), ahead)
    with pytest.raises(InvalidRequest, match="needs room for 41 tokens; this worker's KV pool holds 40"):
        check_request(request("a", (1,) * 30, 11), ahead)


@pytest.mark.parametrize(
    "good",
    [
        request("a", (1,), 2, logprobs=0, prompt_logprobs=0),
        request("a", (1,), 2, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS),
        request("a", (0, INT32 - 1), 2),
        request("a", (1,), 2, min_tokens=2, generated=(1, 2)),
        request("a", (1,), 0),
        request("a", (1,) * 40, 0, prompt_logprobs=0),  # fills the pool to the last token
        request("a", (1,) * 40, 1),  # the first generated token needs no KV
        request("a", (1,), 2, stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS))),  # the model's own is one of them
    ],
)
def test_the_last_value_that_is_allowed_passes(good: Any) -> None:
    check_request(good, LIMITS)


def test_lengths_may_fill_32_bits() -> None:
    vast = replace(LIMITS, max_model_len=2**40, num_usable_pages=2**40)
    check_request(request("a", (1,), INT32 - 1), vast)
    with pytest.raises(InvalidRequest):
        check_request(request("a", (1,), INT32), vast)


def test_the_first_wrong_id_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"got 7$"):
        check_request(request("a", (0, 1, 7, 9), 2), replace(LIMITS, vocab_size=7))
    with pytest.raises(InvalidRequest, match=r"got -2$"):
        check_request(request("a", (0, 6, -2, 9), 2), replace(LIMITS, vocab_size=7))


def _refusal(num_prompt: int, max_tokens: int, limits: Limits) -> InvalidRequest | None:
    try:
        check_request(request("a", (1,) * num_prompt, max_tokens), limits)
    except InvalidRequest as error:
        return error
    return None


@given(
    num_prompt=st.integers(1, 80),
    max_tokens=st.integers(1, 80),
    max_model_len=st.integers(2, 70),
    num_pages=st.integers(1, 20),
    read_tokens=st.sampled_from([0, 0, 7, 30]),
    num_lookahead=st.integers(0, 1),
)
def test_whoever_follows_the_advice_gets_in(num_prompt: int, max_tokens: int, num_pages: int, **limits: int) -> None:
    sizes = replace(LIMITS, num_usable_pages=num_pages, **limits)
    num_kv = num_prompt + max_tokens - 1 + sizes.num_lookahead
    fits = num_prompt + max_tokens <= sizes.max_model_len and num_kv <= min(sizes.pool_tokens, sizes.read_tokens or num_kv)
    first = error = _refusal(num_prompt, max_tokens, sizes)
    assert (first is None) == fits
    for _ in range(6):  # context, pool and read budget may each have their say, about the prompt and about max_tokens
        if error is None:
            return
        assert isinstance(error, ContextLengthExceeded)
        number = int(re.findall(r"(?:<=|prompt to) (\d+)", error.message)[-1])
        if error.field == "max_tokens":
            assert 0 < number < max_tokens
            max_tokens = number
        else:
            assert (error.field, 0 < number < num_prompt) == ("prompt", True)
            num_prompt = number
        error = _refusal(num_prompt, max_tokens, sizes)
    raise AssertionError("the advice leads nowhere")


def test_without_chunks_a_step_has_to_hold_the_longest_prompt() -> None:
    whole = replace(CONFIG, enable_chunked_prefill=False, max_num_batched_tokens=64)
    check_config(whole, role=Role.UNIFIED, max_model_len=64)
    with pytest.raises(ConfigError) as caught:
        check_config(replace(whole, max_num_batched_tokens=63), role=Role.UNIFIED, max_model_len=64)
    assert caught.value.message == (
        "max_num_batched_tokens is 63, and without chunked prefill one step computes up to 64 tokens; "
        "use --max-num-batched-tokens 64, or chunks"
    )


@given(num_seqs=st.integers(1, 9), num_lookahead=st.integers(0, 3), budget=st.integers(1, 40))
def test_the_step_holds_every_decode_with_its_lookahead_or_says_how_large_it_has_to_be(
    num_seqs: int, num_lookahead: int, budget: int
) -> None:
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    sizes = {"max_model_len": 64, "num_lookahead": num_lookahead}
    check_config(config, role=Role.PREFILL, **sizes)  # decodes nothing
    rows = num_seqs + num_seqs * num_lookahead
    if budget >= rows:
        check_config(config, role=Role.UNIFIED, **sizes)
        return
    with pytest.raises(ConfigError) as caught:
        check_config(config, role=Role.UNIFIED, **sizes)
    assert caught.value.message == (
        f"max_num_batched_tokens is {budget}, but {num_seqs} sequences decode {rows} tokens a step; "
        f"use --max-num-batched-tokens {rows} or more, or fewer --max-num-seqs"
    )
