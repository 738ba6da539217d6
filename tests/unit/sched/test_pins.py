"""Pages of a prefix cache that are pinned for those whose KV is to be fetched: never so many that somebody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.requests import Role
from jdisagg.sched.admission import MAX_WAITING_WEIGHED
from tests.unit.sched.engine_fake import SIZE, FakeEngine, expected, request
from tests.unit.sched.peer_fake import arrive, first_of


def warm(num_pages: int, num_cached: int, max_model_len: int | None = None) -> tuple[FakeEngine, tuple[int, ...]]:
    """A decode worker of `num_pages` pages with `num_cached` idle ones in its index, and the tokens they hold."""
    engine = FakeEngine(
        Role.DECODE, num_pages=num_pages + 1, max_model_len=max_model_len or num_pages * SIZE, max_num_batched_tokens=64
    )
    prompt = tuple(range(1, num_cached * SIZE + 1))
    engine.add(request("warm", prompt, 1))
    engine.run()
    return engine, prompt


@given(num_pages=st.integers(4, 14), data=st.data())
def test_pins_leave_room_for_each_of_those_who_wait(num_pages: int, data: st.DataObject) -> None:
    num_cached = data.draw(st.integers(1, num_pages - 1), label="cached pages")
    engine, cached = warm(num_pages, num_cached)
    held: dict[str, int] = {}  # pages
    needed: dict[str, int] = {}
    for name in ("a", "b", "c"):
        shared = data.draw(st.integers(0, num_cached), label=f"pages {name} shares")
        total = data.draw(st.integers(max(shared, 1), num_pages), label=f"pages {name} needs")
        is_remote = data.draw(st.booleans(), label=f"{name} is remote")
        own = tuple(1000 * (i + 1) + ord(name) for i in range((total - shared) * SIZE))
        engine.add(request(name, cached[: shared * SIZE] + own, 0 if total == num_pages else 1), remote=is_remote)
        pinned = shared if is_remote else 0
        fits = pinned + sum(held.values()) + max(total - pinned, *(needed[n] - held[n] for n in held), 0) <= num_pages
        held[name] = pinned if fits else 0
        needed[name] = total
        if is_remote:
            assert engine.scheduler.held_tokens(name) == held[name] * SIZE
    engine.scheduler.check()


@pytest.mark.parametrize(("num_waiting", "num_fetching"), [(MAX_WAITING_WEIGHED - 20, 20), (MAX_WAITING_WEIGHED - 20, 21)])
def test_behind_a_long_queue_nothing_is_pinned(num_waiting: int, num_fetching: int) -> None:
    engine, cached = warm(20, 2)
    for i in range(num_waiting + num_fetching):
        engine.add(request(f"r{i}", (500 + i,), 1), remote=i >= num_waiting)
    engine.add(request("a", (*cached, 7), 2), remote=True)
    is_long = num_waiting + num_fetching > MAX_WAITING_WEIGHED
    assert engine.scheduler.held_tokens("a") == (0 if is_long else 8)


def test_what_is_found_for_a_sequence_that_never_got_anything_of_its_peer_was_cached() -> None:
    engine, cached = warm(20, 2)
    for i in range(MAX_WAITING_WEIGHED + 1):
        engine.add(request(f"r{i}", (500 + i,), 1))
    engine.add(request("a", (*cached, 7), 2), remote=True)  # pins nothing
    engine.scheduler.compute_locally("a")
    engine.run()
    assert engine.seen["a"].last.cached_tokens == 8


@pytest.mark.parametrize(("max_model_len", "held"), [(72, 8), (73, 0)])
def test_a_pool_with_room_for_the_longest_beside_the_pin_is_not_weighed(max_model_len: int, held: int) -> None:
    engine, cached = warm(20, 2, max_model_len)  # 2 pinned and 18 for 72 tokens
    for i in range(MAX_WAITING_WEIGHED + 1):
        engine.add(request(f"r{i}", (500 + i,), 1))
    engine.add(request("a", (*cached, 7), 2), remote=True)
    assert engine.scheduler.held_tokens("a") == held


@pytest.mark.parametrize(("num_pages", "held"), [(8, 0), (9, 16)])
def test_a_pin_takes_no_page_that_a_running_sequence_was_promised(num_pages: int, held: int) -> None:
    engine = FakeEngine(
        Role.DECODE, num_pages=num_pages + 1, max_model_len=20, max_num_batched_tokens=64, reserved_decode_tokens=16
    )
    cached = tuple(range(1, 17))
    engine.add(request("warm", cached, 1))
    engine.run()
    engine.add(request("a", (100, 101, 102, 103), 16))  # five pages in all, with those it was promised
    engine.tick()
    engine.add(request("b", (*cached, 7), 1), remote=True, is_open=False)
    assert engine.scheduler.held_tokens("b") == held
    while "a" in engine.scheduler.table.live:
        engine.tick()
        assert not engine.scheduler.preempted
    assert engine.seen["a"].tokens == expected((100, 101, 102, 103), 16)


def test_pins_are_counted_and_bounded_by_what_the_caller_may_hold() -> None:
    engine, cached = warm(30, 3)
    before = replace(engine.scheduler.stats)
    unknown = (99, *cached[1:])
    for name, prompt, limit, held in (
        ("a", cached, 13, 12),
        ("b", cached, 11, 8),
        ("c", cached, 3, 0),
        ("d", unknown, 13, 0),
    ):
        engine.scheduler.add(request(name, (*prompt, 7), 2), 0.0)
        engine.scheduler.fetch_first(name, limit)
        assert engine.scheduler.held_tokens(name) == held
    stats = engine.scheduler.stats
    assert stats.prefix_hit_tokens - before.prefix_hit_tokens == 12 + 8
    assert stats.prefix_query_tokens - before.prefix_query_tokens == 4 * 13  # those that are not found, too


@pytest.mark.parametrize("local_prefill", [True, False])
def test_pins_of_those_whose_peer_has_not_begun_hold_up_nobody_who_could_go_on(local_prefill: bool) -> None:
    engine = FakeEngine(Role.DECODE, num_pages=11, local_prefill=local_prefill)
    shared, prompts = tuple(range(1, 17)), {"runs": (9, 8, 7), "pins": (*range(1, 17), 5), "less": (*range(1, 9), 6)}
    engine.add(request("before", shared, 1))
    engine.run()
    engine.add(request("runs", prompts["runs"], 30), remote=True)  # 8 of 10 pages in the end
    engine.tick()
    arrive(engine, engine.scheduler.take_reserved()[0], prompts["runs"])
    engine.tick()
    engine.add(request("pins", prompts["pins"], 3), request("less", prompts["less"], 3), remote=True, is_open=False)
    assert [engine.scheduler.held_tokens(name) for name in ("pins", "less")] == [16, 8]
    again: list[str] = []
    for _ in range(100):
        engine.tick()
        while resumed := engine.scheduler.take_retracted():
            again += [one.request_id for one in resumed]
    assert engine.scheduler.stats.retractions == 0
    assert engine.seen["runs"].tokens == expected((9, 8, 7), 30)
    assert engine.scheduler.held_tokens("pins") == 0
    for name in ("pins", "less"):
        engine.scheduler.peer_ready(name)
        engine.tick()
        (reserved,) = engine.scheduler.take_reserved()
        assert reserved.held_tokens == engine.scheduler.held_tokens(name)
        arrive(engine, reserved, prompts[name])
    engine.run()
    assert again == ["pins"]  # of the other one's nothing would be free: "pins" has its pages, too
    assert [engine.seen[name].tokens for name in ("pins", "less")] == [expected(prompts[name], 3) for name in ("pins", "less")]


@pytest.mark.parametrize(("reserve", "num_pinned", "num_lifted"), [(0, 3, 1), (4, 3, 1), (16, 2, 0)])
def test_pins_of_those_whose_peer_has_not_begun_cost_nobody_who_runs_its_pages(
    reserve: int, num_pinned: int, num_lifted: int
) -> None:
    """Three run and take a page each in the same step, four times. One pin is given up as those are wanted; none where all of
    them were kept."""
    engine = FakeEngine(Role.DECODE, num_pages=25, max_model_len=24, reserved_decode_tokens=reserve)
    turns = {f"turn{i}": tuple(range(100 * i + 100, 100 * i + 116)) for i in range(3)}
    for name, prompt in turns.items():
        engine.add(request(f"before {name}", prompt, 1))
        engine.run()
    engine.add(*(request(f"runs{i}", (i + 1,) * 4, 16) for i in range(3)))
    for _ in range(3):
        engine.tick()
    engine.add(*(request(name, (*prompt, 7), 2) for name, prompt in turns.items()), remote=True, is_open=False)
    pinned = [name for name in turns if engine.scheduler.held_tokens(name)]
    again: list[str] = []
    while engine.scheduler.counts()["running"]:
        engine.tick()
        while resumed := engine.scheduler.take_retracted():
            again += [one.request_id for one in resumed]
    assert engine.scheduler.stats.retractions == 0
    assert len(pinned) == num_pinned
    assert again == list(reversed(pinned))[:num_lifted]  # the last one first
    for name in turns:
        engine.drop(name)
    engine.run()


def test_pins_of_pages_that_those_who_run_have_too_are_kept_as_nothing_would_be_free_without_them() -> None:
    engine, shared = FakeEngine(Role.DECODE, num_pages=16, max_model_len=40, reserved_decode_tokens=0), tuple(range(100, 116))
    engine.add(request("before", shared, 1))
    engine.run()
    engine.add(*(request(f"runs{i}", (*shared, *(i + 1,) * 4), 16) for i in range(3)))
    for _ in range(3):
        engine.tick()
    waiting = [f"waits{i}" for i in range(3)]
    engine.add(*(request(name, (*shared, 7), 2) for name in waiting), remote=True, is_open=False)
    assert all(engine.scheduler.held_tokens(name) for name in waiting)
    again: list[str] = []
    while engine.scheduler.counts()["running"]:
        engine.tick()
        while resumed := engine.scheduler.take_retracted():
            again += [one.request_id for one in resumed]
    assert engine.scheduler.stats.retractions
    assert not {*again} & {*waiting}
    assert all(engine.scheduler.held_tokens(name) for name in waiting)
    for name in waiting:
        engine.drop(name)
    engine.run()


def test_who_gives_its_pins_up_asks_anew_with_the_token_that_it_has() -> None:
    engine, cached = warm(10, 4)
    prompt = (*cached, 5)
    engine.add(request("pins", prompt, 4), remote=True, is_open=False)
    engine.collect([engine.scheduler.remote_first_token("pins", first_of(prompt, "pins"))])  # then its peer is lost
    engine.add(request("long", (9,) * 28, 2))  # 7 of the 6 pages that are free
    engine.tick()
    (again,) = engine.scheduler.take_retracted()
    assert again.token_ids == (*prompt, *expected(prompt, 1))
    engine.scheduler.peer_ready("pins")
    while not (reserved := engine.scheduler.take_reserved()):
        engine.tick()
    assert (reserved[0].held_tokens, reserved[0].num_tokens) == (0, len(again.token_ids))
    arrive(engine, reserved[0], again.token_ids)
    engine.run()
    assert engine.seen["pins"].tokens == expected(prompt, 4)
    assert engine.seen["long"].tokens == expected((9,) * 28, 2)


@pytest.mark.parametrize(("reserve", "num_pages", "both_fit"), [(5, 10, False), (5, 11, True), (0, 9, False), (0, 10, True)])
def test_two_whose_first_tokens_come_before_their_memory_do_not_wait_for_each_others_pins(
    reserve: int, num_pages: int, both_fit: bool
) -> None:
    """Each shares 4 pages and needs two more until its first token is known, then three; without a reserve one, then two."""
    engine = FakeEngine(Role.DECODE, num_pages=num_pages + 1, reserved_decode_tokens=reserve)
    prompts = {name: (*range(first, first + 16), 5, 6, 7, 8) for name, first in (("a", 1), ("b", 101))}
    for name, prompt in prompts.items():
        engine.add(request(f"before {name}", prompt[:16], 1))
        engine.run()
    engine.add(request("runs", (9,), 3), remote=True)
    engine.tick()
    (runs,) = engine.scheduler.take_reserved()
    engine.add(*(request(name, prompt, 8) for name, prompt in prompts.items()), remote=True)
    held = {name: engine.scheduler.held_tokens(name) for name in prompts}
    for name, prompt in prompts.items():
        engine.collect([engine.scheduler.remote_first_token(name, first_of(prompt, name))])
    arrive(engine, runs, (9,))
    for _ in range(100):
        engine.tick()
        for reserved in engine.scheduler.take_reserved():
            assert reserved.held_tokens == held[reserved.request_id]
            arrive(engine, reserved, prompts[reserved.request_id], first=False)
    assert [engine.seen[name].tokens for name in prompts] == [expected(prompt, 8) for prompt in prompts.values()]
    assert held == {"a": 16, "b": both_fit * 16}


def test_a_prompt_is_counted_once_though_pages_were_pinned_and_it_is_computed_here_after_all() -> None:
    engine, cached = warm(30, 3)
    before = replace(engine.scheduler.stats)
    engine.add(request("a", (*cached, 7, 8), 3), remote=True)
    assert engine.scheduler.held_tokens("a") == 12
    engine.scheduler.compute_locally("a")
    engine.run()
    assert engine.seen["a"].tokens == expected((*cached, 7, 8), 3)
    stats = engine.scheduler.stats
    assert stats.prefix_query_tokens - before.prefix_query_tokens == 14
    assert stats.prefix_hit_tokens - before.prefix_hit_tokens == 12
