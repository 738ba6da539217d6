"""n choices of one request: one prompt in memory, a page of their own each from where they part."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Role
from jdisagg.sched.plan import PageCopy
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import arrive

PROMPT = tuple(range(1, 11))  # 10 tokens: two full pages of 4 and a half one


def choices(n: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6) -> list:
    return [request(f"r/{i}", prompt, max_tokens, fork_group="r") for i in range(n)]


@pytest.mark.covers("H09", "X28")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 9, 10])
def test_eight_choices_compute_the_prompt_once_and_share_its_pages(length: int, caching: bool) -> None:
    engine = FakeEngine(num_pages=100, max_num_seqs=8, max_num_batched_tokens=64, caching=caching)
    engine.add(*choices(8, PROMPT[:length]))
    peak = 0
    while not engine.scheduler.is_idle():
        engine.tick()
        peak = max(peak, engine.scheduler.num_pages - engine.scheduler.num_free_pages)
    engine.run()
    assert all(engine.seen[f"r/{i}"].tokens == expected(PROMPT[:length], 6) for i in range(8))
    assert sum(len(c.token_ids) for p in engine.plans for c in p.prefill) == length
    assert engine.scheduler.stats.forks == 7
    prompt_pages, output_pages = -(-length // 4), -(-6 // 4)
    assert peak <= prompt_pages + 8 * output_pages + 8
    copies = [copy for plan in engine.plans for copy in plan.copies]
    assert len(copies) == (7 if (length - 1) % 4 else 0)
    assert all(isinstance(copy, PageCopy) for copy in copies)
    assert len({copy.target for copy in copies}) == len(copies)


def test_choices_that_wait_for_slots_hold_their_share_of_the_prompt() -> None:
    engine = FakeEngine(num_pages=100, max_num_seqs=3, caching=False)
    engine.add(*choices(7))
    engine.run()
    assert all(engine.seen[f"r/{i}"].tokens == expected(PROMPT, 6) for i in range(7))
    assert engine.scheduler.stats.prefill_tokens == len(PROMPT)


def test_a_choice_whose_leader_was_cancelled_leads() -> None:
    engine = FakeEngine(caching=False)
    engine.add(*choices(3))
    assert engine.scheduler.counts()["forking"] == 2
    engine.scheduler.cancel("r/0")
    assert engine.scheduler.counts() | {"waiting": 1, "forking": 1} == engine.scheduler.counts()
    engine.run()
    assert "r/0" not in engine.seen
    assert all(engine.seen[f"r/{i}"].tokens == expected(PROMPT, 6) for i in (1, 2))
    assert engine.scheduler.stats.prefill_tokens == len(PROMPT)


def test_a_remote_group_fetches_once_and_a_new_leader_is_announced() -> None:
    engine = FakeEngine(Role.DECODE, caching=False)
    engine.add(*choices(3), remote=True)
    assert [engine.scheduler.awaits_peer(f"r/{i}") for i in range(3)] == [True, False, False]
    engine.tick()
    assert [r.request_id for r in engine.scheduler.take_reserved()] == ["r/0"]
    engine.scheduler.cancel("r/0")
    assert [r.request_id for r in engine.scheduler.take_retracted()] == ["r/1"]
    assert [engine.scheduler.awaits_peer(f"r/{i}") for i in (1, 2)] == [True, False]


def test_what_cannot_be_shared_is_not_waited_for() -> None:
    engine = FakeEngine(Role.DECODE)
    one, two = choices(2, max_tokens=1)  # ends with the first token, which comes without KV
    engine.add(one, two, remote=True)
    assert engine.scheduler.counts()["prealloc"] == 2
    other = request("r/9", PROMPT[:5], 3, fork_group="r")
    salted = request("r/8", PROMPT, 3, fork_group="r", salt="tenant")
    resumed = request("r/7", PROMPT, 3, fork_group="r", generated=(24,))
    scored = request("r/6", PROMPT, 3, fork_group="r", prompt_logprobs=0)
    engine.add(other, salted, resumed, scored, remote=True)
    assert engine.scheduler.counts()["forking"] == 0


def test_a_prefill_worker_never_decodes_so_nobody_forks_there() -> None:
    engine = FakeEngine(Role.PREFILL)
    engine.add(*choices(3))
    assert engine.scheduler.counts()["waiting"] == 3
    for _ in range(6):
        engine.tick()
    assert not any(plan.decode for plan in engine.plans)
    assert all(engine.seen[f"r/{i}"].tokens == expected(PROMPT, 1) for i in range(3))


def test_choices_that_wait_for_their_sibling_take_no_place_in_the_queue() -> None:
    engine = FakeEngine(num_pages=100, max_queue_len=1, max_num_seqs=2)
    engine.add(*choices(8))
    engine.run()
    assert all(engine.seen[f"r/{i}"].tokens == expected(PROMPT, 6) for i in range(8))


@pytest.mark.parametrize("local_prefill", [True, False])
def test_a_choice_that_loses_its_pages_in_the_step_it_got_them_keeps_its_siblings_kv(local_prefill: bool) -> None:
    """The prompt fills its pages and the pool has one more: the second choice gets it, for its copy of the last page, and the
    first one takes it away, for its next token. What goes to host memory is what was copied."""
    prompt = tuple(range(1, 13))
    engine = FakeEngine(Role.DECODE, num_pages=5, host_tokens=16, caching=False, local_prefill=local_prefill)
    engine.add(*choices(2, prompt, max_tokens=4), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, prompt)
    engine.run()
    assert engine.scheduler.stats.offloaded_tokens == engine.scheduler.stats.restored_tokens == len(prompt) - 1
    assert [engine.seen[f"r/{i}"].tokens for i in range(2)] == [expected(prompt, 4)] * 2


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_nobody_forks_from_another_prompt_or_salt_under_the_same_group_name(salt: str) -> None:
    engine = FakeEngine(caching=False)
    prompt = (9,) * 5 if not salt else PROMPT
    engine.add(request("r/0", PROMPT, 8, fork_group="r"))
    engine.add(*(request(f"r/{i}", prompt, 3, fork_group="r", salt=salt) for i in (8, 9)))
    while not engine.scheduler.counts()["running"] or engine.scheduler.counts()["forking"]:
        engine.tick()
    pages = {s.request_id: s.holding.pages for s in engine.scheduler.table.live.values()}
    assert pages["r/9"][0] == pages["r/8"][0] != pages["r/0"][0]
    engine.run()
    assert engine.seen["r/0"].tokens == expected(PROMPT, 8)
    assert all(engine.seen[f"r/{i}"].tokens == expected(prompt, 3) for i in (8, 9))


def test_choices_whose_leader_is_gone_do_not_wait_for_another_prompt_of_the_same_group_name() -> None:
    engine = FakeEngine(caching=False)
    engine.add(request("r/0", PROMPT, 8, fork_group="r"))
    engine.add(*(request(f"r/{i}", (9,) * 5, 3, fork_group="r") for i in (8, 9)))
    engine.scheduler.cancel("r/8")
    assert engine.scheduler.counts()["forking"] == 0
    engine.run()
    assert engine.seen["r/9"].tokens == expected((9,) * 5, 3)
