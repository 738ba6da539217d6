"""Who may take memory, counted in pages by hand: prompts, their outputs, choices of a prompt, and KV on the host."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jdisagg.core.requests import Role
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import SIZE, FakeEngine, expected, request
from tests.unit.sched.peer_fake import arrive, status_of

SIDES = st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans())  # prompt tokens, output tokens, remote


def room(num_prompt: int, max_tokens: int, reserve: int) -> int:
    """Pages for the prompt and the first `reserve` tokens of the output; the last of those is never written."""
    written = num_prompt if reserve == 0 else num_prompt + min(max_tokens, reserve) - 1
    return -(-written // SIZE)


@example(first=(14, 4, False), second=(10, 4, True), reserve=4, num_pages=8, later=False)  # 17 and 13 tokens: a page too many
@example(first=(14, 4, True), second=(9, 4, False), reserve=4, num_pages=8, later=True)  # 17 and 12 tokens: just enough
@example(first=(17, 4, False), second=(12, 1, False), reserve=9, num_pages=8, later=True)  # outputs end before the reserve
@given(first=SIDES, second=SIDES, reserve=st.integers(0, 9), num_pages=st.integers(8, 16), later=st.booleans())
def test_the_second_gets_in_exactly_when_the_room_kept_for_both_fits(
    first: tuple[int, int, bool], second: tuple[int, int, bool], reserve: int, num_pages: int, later: bool
) -> None:
    engine = FakeEngine(
        Role.DECODE, num_pages=num_pages + 1, caching=False, reserved_decode_tokens=reserve, max_num_batched_tokens=64
    )
    for name, (num_prompt, max_tokens, remote) in (("a", first), ("b", second)):
        engine.add(request(name, (1,) * num_prompt, max_tokens), remote=remote)
        if later or name == "b":
            engine.step()
    waiting = {s["request_id"] for s in engine.scheduler.snapshot()["sequences"] if s["status"] in ("waiting", "prealloc")}
    kept = [room(*side[:2], reserve) for side in (first, second)]
    assert waiting == ({"b"} if sum(kept) > num_pages else set())


@pytest.mark.parametrize(("num_pages", "forks_at_once"), [(3, False), (4, True)])
def test_a_choice_needs_only_the_pages_it_does_not_share(num_pages: int, forks_at_once: bool) -> None:
    engine = FakeEngine(num_pages=num_pages + 1, caching=False, max_num_batched_tokens=64, delay=0)
    prompt = tuple(range(1, 11))  # two full pages are shared, the third is the choice's own
    engine.add(*(request(f"r/{i}", prompt, 3, fork_group="r") for i in range(2)))
    engine.tick()
    assert [a.request_id for a in engine.tick().admit] == (["r/1"] if forks_at_once else [])
    engine.run()
    assert engine.seen["r/1"].tokens == expected(prompt, 3)


@pytest.mark.parametrize(("reserve", "num_pages", "forks_at_once"), [(4, 5, False), (4, 6, True), (0, 4, True)])
def test_a_choice_leaves_what_was_promised_to_others_and_gets_its_own_promise(
    reserve: int, num_pages: int, forks_at_once: bool
) -> None:
    """Each needs 13 tokens at its longest, 4 pages; two of them are shared, the leader has taken three."""
    engine = FakeEngine(
        num_pages=num_pages + 1, caching=False, max_num_batched_tokens=64, reserved_decode_tokens=reserve, delay=0
    )
    prompt = tuple(range(1, 11))
    engine.add(*(request(f"r/{i}", prompt, 4, fork_group="r") for i in range(2)))
    engine.tick()
    assert [a.request_id for a in engine.tick().admit] == (["r/1"] if forks_at_once else [])
    if reserve:
        assert engine.scheduler.stats.preemptions == 0
    engine.run()
    assert engine.seen["r/1"].tokens == expected(prompt, 4)


@example(num_pages=7, reserve=6, lengths=[8, 9, 4, 6])  # one waits while another's promise is not used up
@given(num_pages=st.integers(6, 11), reserve=st.integers(0, 6), lengths=st.lists(st.integers(1, 9), min_size=3, max_size=4))
def test_kv_on_the_host_comes_back_when_and_only_when_there_is_room_for_it(
    num_pages: int, reserve: int, lengths: list[int]
) -> None:
    engine = FakeEngine(num_pages=num_pages + 1, host_tokens=200, reserved_decode_tokens=reserve, caching=False, delay=0)
    engine.add(*(request(f"r{i}", (i + 1,) * n, 12) for i, n in enumerate(lengths)))
    while not engine.scheduler.is_idle():
        assert len(engine.plans) < 400, "it does not end"
        preemptions = engine.scheduler.stats.preemptions
        plan = engine.step()
        assert all(len(copy.page_table[0]) == -(-copy.num_tokens // SIZE) for copy in plan.offload)  # nothing beside the KV
        table = engine.scheduler.table
        spare = table.pages.num_unpromised
        if plan.restore:
            assert spare >= 0  # nothing was taken of what others were promised
        away = [s for s in table.queues[Status.WAITING] if s.wait.host_tokens]
        if away and table.slots.num_free and engine.scheduler.stats.preemptions == preemptions:
            num_known = away[0].num_known
            more = min(away[0].max_len - num_known, max(3, reserve))  # whoever was set back wants room for some steps
            assert -(-(num_known + max(more - 1, 0)) // SIZE) > spare
        engine.commit_one()
    assert all(engine.seen[f"r{i}"].tokens == expected((i + 1,) * n, 12) for i, n in enumerate(lengths))


def test_kv_on_the_host_is_let_go_where_its_beginning_is_in_memory_and_all_of_it_has_no_room() -> None:
    """`b` shares ten pages with `a`, which goes on for long: with all of its KV on the host it would wait for it, and everybody
    behind it too."""
    ends: list[dict[str, int]] = []
    for host_tokens in (0, 1000):
        engine = FakeEngine(num_pages=31, max_model_len=140, max_num_batched_tokens=64, host_tokens=host_tokens)
        shared, other = tuple(range(1, 42)), tuple(range(5, 24))
        for name, prompt, num, ticks in (("a", shared, 70, 3), ("c", other, 19, 1), ("b", (*shared, 3), 26, 2)):
            engine.add(request(name, prompt, num))
            for _ in range(ticks):
                engine.tick()
        at: dict[str, int] = {}
        while not engine.scheduler.is_idle():
            engine.tick()
            if engine.scheduler.preempted:
                engine.add(request("late", (9, 9), 2))  # behind whom it must not stand
            at |= {name: len(engine.plans) for name, one in engine.seen.items() if name not in at and one.last.finish}
        assert engine.seen["b"].tokens == expected((*shared, 3), 26)
        assert engine.scheduler.stats.restored_tokens == 0
        ends.append(at)
    assert ends[0] == ends[1]


def test_kv_on_the_host_is_not_let_go_while_no_slot_is_free() -> None:
    """`w` gave its pages to `a`, whose beginning it shares, and its slot to `ready`. A hand-off that ends leaves room for the
    rest of it, but with the pages that come with the slot all of it fits."""
    engine = FakeEngine(Role.DECODE, num_pages=20, max_num_seqs=2, max_num_batched_tokens=64, host_tokens=100, delay=0)
    shared, other = tuple(range(1, 18)), (9,) * 8
    engine.add(request("a", shared, 40))
    engine.add(request("ready", other, 8), request("gone", (8,) * 12, 4), remote=True)
    engine.add(request("w", (*shared, 3), 30))
    engine.tick()
    arrive(engine, engine.scheduler.take_reserved()[0], other)
    while engine.tick().decode != (0, 1) or status_of(engine, "w") != "waiting":
        assert len(engine.plans) < 30, "w keeps its pages"
    engine.add(request("late", (7, 7), 3), remote=True)
    engine.drop("gone")
    while status_of(engine, "ready") == "running":
        assert not engine.tick().forget
        assert status_of(engine, "w") == "waiting"
    assert [copy.key for copy in engine.tick().restore] == ["w"]
    engine.drop("late")
    engine.run()
    assert engine.seen["w"].tokens == expected((*shared, 3), 30)


@pytest.mark.parametrize(("num_pages", "num_forks"), [(7, 0), (8, 1), (10, 1), (11, 2)])
def test_choices_of_one_step_leave_each_other_what_they_are_promised(num_pages: int, num_forks: int) -> None:
    """Each is promised 5 pages; the leader has taken 3, and a choice shares 2 of them and takes one."""
    engine = FakeEngine(num_pages=num_pages + 1, caching=False, max_num_batched_tokens=64, reserved_decode_tokens=8, delay=0)
    prompt = tuple(range(1, 11))
    engine.add(*(request(f"r/{i}", prompt, 8, fork_group="r") for i in range(3)))
    engine.tick()
    engine.tick()
    assert engine.scheduler.stats.forks == num_forks
    engine.run()
    assert all(engine.seen[f"r/{i}"].tokens == expected(prompt, 8) for i in range(3))
