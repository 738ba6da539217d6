"""Who starts, in what order, and how often those who lack memory are passed."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Role
from jdisagg.sched.plan import PageCopy
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import arrive

LONG = tuple(range(100, 120))  # 5 pages of 4


def started(engine: FakeEngine) -> list[str]:
    """Who was admitted in the next step."""
    return [admit.request_id for admit in engine.tick().admit]


@pytest.mark.parametrize("max_bypass", [0, 1, 3])
def test_later_ones_pass_one_that_lacks_memory_so_often_and_never_again(max_bypass: int) -> None:
    engine = FakeEngine(num_pages=8, max_bypass=max_bypass, max_num_batched_tokens=64, caching=False, delay=0)
    engine.add(request("first", (1,) * 10, 6))  # 3 pages of 7, 4 later on
    engine.tick()
    engine.add(request("long", LONG, 4))
    smalls = [f"s{i}" for i in range(5)]
    passed = []
    for name in smalls:
        engine.add(request(name, (7,), 1))
        passed += started(engine)
    assert passed == smalls[:max_bypass]
    engine.run()
    admitted = [admit.request_id for plan in engine.plans for admit in plan.admit]
    assert admitted == ["first", *smalls[:max_bypass], "long", *smalls[max_bypass:]]
    assert engine.seen["long"].tokens == expected(LONG, 4)


def test_passing_is_counted_for_everyone_who_lacks_memory() -> None:
    engine = FakeEngine(num_pages=8, max_bypass=2, max_num_batched_tokens=64, caching=False, delay=0)
    engine.add(request("first", (1,) * 10, 6))
    engine.tick()
    engine.add(request("long", LONG, 4), request("longer", (*LONG, 1), 4), request("s0", (7,), 1), request("s1", (8,), 1))
    assert started(engine) == ["s0", "s1"]  # two that lack memory are looked past, twice
    engine.add(request("s2", (9,), 1))
    assert started(engine) == []
    engine.run()
    assert engine.seen["longer"].tokens == expected((*LONG, 1), 4)


def test_more_who_lack_memory_than_may_pass_close_the_door() -> None:
    engine = FakeEngine(num_pages=8, max_bypass=1, max_num_batched_tokens=64, caching=False, delay=0)
    engine.add(request("first", (1,) * 10, 6))
    engine.tick()
    engine.add(request("long", LONG, 4), request("longer", (*LONG, 1), 4), request("s0", (7,), 1))
    assert started(engine) == []
    engine.run()


def test_nobody_passes_one_that_has_given_up_its_pages() -> None:
    engine = FakeEngine(num_pages=8, max_num_batched_tokens=64, caching=False, delay=0)
    engine.add(request("a", (1, 2, 3, 4), 12), request("b", (5, 6, 7, 8), 12), request("c", (9, 10, 11, 12), 12))
    while not engine.scheduler.stats.preemptions:
        assert engine.scheduler.table.live, "nobody was preempted"
        engine.tick()
    engine.add(request("small", (7,), 1))
    engine.run()
    admitted = [admit.request_id for plan in engine.plans for admit in plan.admit]
    assert admitted == ["a", "b", "c", "b", "c", "small"]
    assert engine.seen["c"].tokens == expected((9, 10, 11, 12), 12)


@pytest.mark.parametrize(("max_bypass", "reserved"), [(0, []), (16, ["y"])])
def test_when_nobody_holds_memory_somebody_passes_and_then_the_rule_holds_again(max_bypass: int, reserved: list[str]) -> None:
    engine = FakeEngine(Role.DECODE, num_pages=9, max_num_batched_tokens=64, max_bypass=max_bypass)
    engine.add(request("warm", LONG[:12], 1))
    engine.run()
    engine.add(request("pins", (*LONG[:12], 1), 3), remote=True, is_open=False)  # holds 3 of 8 pages and waits
    assert engine.scheduler.held_tokens("pins") == 12
    engine.add(request("big", tuple(range(300, 321)), 2))  # 6 pages beside 3
    engine.add(request("x", (1,), 2))
    engine.add(request("y", (2,), 2), remote=True)
    engine.step()
    assert [a.request_id for p in engine.plans for a in p.admit][1:] == ["x"]
    assert [r.request_id for r in engine.scheduler.take_reserved()] == reserved
    engine.scheduler.cancel("pins")
    engine.scheduler.cancel("y")
    engine.run()
    assert engine.seen["big"].tokens == expected(tuple(range(300, 321)), 2)


def test_unready_peers_are_passed_over_however_many() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(*(request(f"r{i}", (i + 1,), 3) for i in range(3)), remote=True, is_open=False)
    engine.add(request("ready", (9,), 3), remote=True)
    engine.add(request("local", (8,), 3))
    assert started(engine) == ["local"]
    assert [r.request_id for r in engine.scheduler.take_reserved()] == ["ready"]
    engine.scheduler.peer_ready("r1")
    engine.tick()
    assert [r.request_id for r in engine.scheduler.take_reserved()] == ["r1"]
    for name in ("r0", "r1", "r2", "ready"):
        engine.scheduler.cancel(name)
    engine.run()


def test_arrived_sequences_start_as_far_as_slots_and_budget_go() -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=2, max_num_batched_tokens=2, delay=0)
    prompts = {name: (i + 1, 2, 3) for i, name in enumerate("abc")}
    engine.add(*(request(name, prompt, 3) for name, prompt in prompts.items()), remote=True)
    engine.step()
    for reserved in engine.scheduler.take_reserved():
        arrive(engine, reserved, prompts[reserved.request_id])
    plan = engine.tick()
    assert ([a.request_id for a in plan.admit], plan.decode) == (["a", "b"], (0, 1))
    engine.run()
    assert all(engine.seen[name].tokens == expected(prompt, 3) for name, prompt in prompts.items())


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    engine = FakeEngine(enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20, delay=0)
    engine.add(request("a", LONG[:12], 3), request("b", LONG[2:11], 3), request("c", (1,), 3))
    assert started(engine) == ["a"]  # 9 more tokens do not fit, and nobody passes
    assert [len(c.token_ids) for c in engine.plans[0].prefill] == [12]
    assert [len(c.token_ids) for c in engine.tick().prefill] == [9, 1]
    engine.run()
    engine.add(request("again", LONG[:13], 3))
    assert [c.start for c in engine.tick().prefill] == [12]
    engine.run()
    assert engine.seen["b"].tokens == expected(LONG[2:11], 3)


def test_a_choice_copies_the_page_it_will_write_into_and_feeds_the_last_token_itself() -> None:
    engine = FakeEngine(max_num_batched_tokens=64, caching=False, delay=0)
    prompt = LONG[:10]
    engine.add(*(request(f"r/{i}", prompt, 3, fork_group="r") for i in range(2)))
    engine.tick()
    plan = engine.tick()
    (admit,) = plan.admit
    assert (admit.request_id, admit.decodes, admit.page_table[0][:2]) == ("r/1", True, (1, 2))
    assert plan.copies == (PageCopy(source=3, target=admit.page_table[0][2]),)
    assert set(plan.decode) == {0, 1}
    assert engine.scheduler.stats.forks == 1
    engine.run()
    assert engine.seen["r/1"].tokens == expected(prompt, 3)
    assert engine.seen["r/1"].last.cached_tokens == 9


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.DECODE])
def test_kv_kept_on_the_host_comes_back_into_new_pages_and_decoding_goes_on(role: Role) -> None:
    engine = FakeEngine(role, num_pages=8, host_tokens=100, caching=False, delay=0)
    prompts = {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8), "c": (9, 10, 11, 12)}
    engine.add(*(request(name, prompt, 12) for name, prompt in prompts.items()))
    engine.run()
    out = [copy for plan in engine.plans for copy in plan.offload]
    back = [copy for plan in engine.plans for copy in plan.restore]
    assert out
    assert sorted((c.key, c.num_tokens) for c in out) == sorted((c.key, c.num_tokens) for c in back)
    stats = engine.scheduler.stats
    counts = (len(out), 0) if role is Role.UNIFIED else (0, len(out))
    assert len(out) == 2
    assert (stats.preemptions, stats.retractions) == counts
    assert stats.offloaded_tokens == stats.restored_tokens == sum(c.num_tokens for c in out)
    assert stats.prefill_tokens == 12  # the prompts, once
    assert all(engine.seen[name].tokens == expected(prompt, 12) for name, prompt in prompts.items())


def test_a_copy_on_the_host_ends_with_its_sequence() -> None:
    engine = FakeEngine(num_pages=8, host_tokens=100, caching=False, delay=0)
    engine.add(request("a", (1, 2, 3, 4), 12), request("b", (5, 6, 7, 8), 12), request("c", (9, 10, 11, 12), 12))
    while not engine.device.host:
        assert engine.scheduler.table.live, "nothing went to the host"
        engine.tick()
    (victim,) = engine.device.host
    assert engine.scheduler.snapshot()["host_tokens"]["used"] == len(engine.device.host[victim])
    engine.scheduler.cancel(victim)
    assert engine.scheduler.snapshot()["host_tokens"]["used"] == 0
    assert engine.tick().forget == (victim,)
    engine.run()


def test_a_choice_forks_as_soon_as_all_but_the_last_token_of_its_prompt_is_on_its_way() -> None:
    engine = FakeEngine(max_num_batched_tokens=9, caching=False)
    prompt = LONG[:10]
    engine.add(*(request(f"r/{i}", prompt, 3, fork_group="r") for i in range(2)))
    assert [len(c.token_ids) for c in engine.step().prefill] == [9]
    plan = engine.step()
    assert ([len(c.token_ids) for c in plan.prefill], [a.request_id for a in plan.admit]) == ([1], ["r/1"])
    engine.run()
    assert engine.seen["r/1"].tokens == expected(prompt, 3)


@pytest.mark.parametrize(("max_tokens", "remote", "waits"), [(0, False, 0), (1, False, 1), (1, True, 0), (2, True, 1)])
def test_a_choice_waits_for_a_sibling_that_will_have_kv_to_share(max_tokens: int, remote: bool, waits: int) -> None:
    engine = FakeEngine(Role.DECODE, caching=False)
    engine.add(*(request(f"r/{i}", LONG[:10], max_tokens, fork_group="r") for i in range(2)), remote=remote)
    assert engine.scheduler.counts()["forking"] == waits


def test_without_chunks_a_step_is_filled_to_the_last_token_and_found_pages_count() -> None:
    engine = FakeEngine(enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20, delay=0)
    engine.add(request("a", LONG[:12], 1), request("b", (1,) * 8, 1), request("c", (2,), 1))
    assert started(engine) == ["a", "b"]
    engine.run()
    engine.add(request("x", (3,) * 19, 1), request("again", LONG[:13], 1))  # 12 of its tokens are found, one fits
    assert started(engine) == ["x", "again"]
    engine.run()
    assert engine.seen["again"].tokens == expected(LONG[:13], 1)


@pytest.mark.parametrize(("length", "starts"), [(10, ["b"]), (11, [])])
def test_without_chunks_a_prompt_needs_the_reads_of_its_last_token(length: int, starts: list[str]) -> None:
    engine = FakeEngine(
        enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20, max_num_kv_read_tokens=15, delay=0
    )
    engine.add(request("a", (1, 2, 3, 4), 3))
    engine.tick()
    engine.add(request("b", LONG[:length], 1))  # beside a row that reads 5 of 15
    assert started(engine) == starts
    engine.run()
    assert engine.seen["b"].tokens == expected(LONG[:length], 1)


@pytest.mark.parametrize("remote", [False, True])
def test_one_that_fits_is_found_behind_several_that_do_not(remote: bool) -> None:
    engine = FakeEngine(Role.DECODE, num_pages=8, max_num_batched_tokens=64, caching=False, delay=0)
    engine.add(request("first", (1,) * 10, 6))
    engine.tick()
    engine.add(*(request(f"long{i}", LONG, 4) for i in range(3)), request("small", (7,), 1), remote=remote)
    admitted = started(engine)
    assert admitted + [r.request_id for r in engine.scheduler.take_reserved()] == ["small"]
    for name in ("long0", "long1", "long2", "small"):
        engine.scheduler.cancel(name)
    engine.run()


@pytest.mark.parametrize(("num_pages", "admitted"), [(8, ["r/1"]), (9, ["r/1", "x"])])
def test_what_a_choice_is_promised_counts_beside_what_its_sibling_is(num_pages: int, admitted: list[str]) -> None:
    """Each choice holds 3 pages, two of them shared, of 5 it is promised; "x" needs one beyond these 4 + 4."""
    engine = FakeEngine(num_pages=num_pages + 1, reserved_decode_tokens=8, max_num_batched_tokens=64, caching=False, delay=0)
    engine.add(*(request(f"r/{i}", LONG[:10], 8, fork_group="r") for i in range(2)))
    engine.tick()
    engine.add(request("x", (1, 2, 3, 4), 1))
    assert started(engine) == admitted
    engine.run()
    assert engine.scheduler.stats.preemptions == 0


@pytest.mark.parametrize(
    ("reads", "admitted"),
    [(12, ["big"]), (21, ["big"]), (22, ["big", "mid"]), (24, ["big", "mid"]), (25, ["big", "mid", "small"])],
)
def test_arrived_sequences_start_in_order_as_far_as_reads_go(reads: int, admitted: list[str]) -> None:
    """They read 11, 11 and 3 tokens; nobody passes who lacks reads."""
    engine = FakeEngine(Role.DECODE, max_num_kv_read_tokens=reads, max_num_batched_tokens=64, delay=0)
    prompts = {"big": (1,) * 10, "mid": (2,) * 10, "small": (3, 4)}
    engine.add(*(request(name, prompt, 3) for name, prompt in prompts.items()), remote=True)
    engine.step()
    for reserved in engine.scheduler.take_reserved():
        arrive(engine, reserved, prompts[reserved.request_id])
    assert started(engine) == admitted
    engine.run()
    assert all(engine.seen[name].tokens == expected(prompt, 3) for name, prompt in prompts.items())


@pytest.mark.parametrize(("reads", "admitted"), [(11, []), (12, ["b"])])
def test_a_prompt_starts_with_the_last_token_that_may_be_read(reads: int, admitted: list[str]) -> None:
    engine = FakeEngine(max_num_kv_read_tokens=reads, max_num_batched_tokens=64, delay=0)
    engine.add(request("a", (1,) * 10, 2))
    engine.tick()
    engine.add(request("b", (2,), 1))  # beside a row that reads 11
    assert started(engine) == admitted
    engine.run()
    assert engine.seen["b"].tokens == expected((2,), 1)


def test_below_the_safety_margin_the_first_prompt_goes_on_alone() -> None:
    engine = FakeEngine(
        num_pages=11, safety_margin=0.5, long_prefill_token_threshold=4, max_num_batched_tokens=8, caching=False, delay=0
    )
    engine.add(request("a", LONG[:12], 2), request("b", LONG[2:14], 2))  # 6 of 10 pages
    steps = [[c.request_id for c in engine.tick().prefill] for _ in range(3)]
    assert steps == [["a", "b"], ["a"], ["a"]]
    engine.run()
    assert engine.seen["b"].tokens == expected(LONG[2:14], 2)


def _behind_choices_that_lack_memory(max_bypass: int, num_choices: int) -> FakeEngine:
    """One slot of two is free. "local" wants it, came first and fits; the choices came later and do not; last came "ready",
    whose KV is in place."""
    engine = FakeEngine(
        Role.DECODE,
        max_num_seqs=2,
        num_pages=11,
        max_num_batched_tokens=16,
        reserved_decode_tokens=12,
        max_bypass=max_bypass,
        caching=False,
        delay=0,
    )
    engine.add(request("local", (7, 7), 1), remote=True, is_open=False)
    engine.add(*(request(f"c/{i}", (1,) * 9, 12, fork_group="c") for i in range(1 + num_choices)))
    engine.add(request("ready", (8, 8), 20), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, (8, 8))
    engine.scheduler.compute_locally("local")
    return engine


@pytest.mark.parametrize(("max_bypass", "num_choices"), [(0, 1), (2, 3)])
def test_later_ones_that_lack_memory_keep_nobody_out_who_came_before_them(max_bypass: int, num_choices: int) -> None:
    engine = _behind_choices_that_lack_memory(max_bypass, num_choices)
    assert started(engine) == ["local"]
    engine.run()


def test_who_goes_before_later_ones_does_not_pass_them() -> None:
    engine = _behind_choices_that_lack_memory(2, 1)
    engine.tick()
    assert engine.scheduler.table.live["c/1"].wait.num_bypassed == 0
    engine.run()
