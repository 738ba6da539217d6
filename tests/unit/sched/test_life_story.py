"""The life of a request as `jdisagg.replay --why` tells it: its peer, its transfer, what was taken from it, and its end."""

from __future__ import annotations

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import EngineRequest, Output, Role
from tests.unit.sched.engine_fake import FakeEngine, next_token, request
from tests.unit.sched.story import TICK_S, Tell, finish


def first_token(asked: EngineRequest) -> Output:
    return Output(request_id=asked.request_id, token_ids=(next_token(asked.prompt_token_ids),))


def test_the_life_of_a_remote_request_has_its_peer_and_its_transfer(tell: Tell) -> None:
    asked = request("a", (1, 2, 3, 4, 5), 3)

    def drive(engine: FakeEngine) -> None:
        scheduler = engine.scheduler
        engine.add(asked, remote=True, is_open=False)
        engine.tick()
        engine.now_s = 0.010
        scheduler.peer_ready("a")
        engine.tick()
        engine.now_s = 0.020
        (reserved,) = scheduler.take_reserved()
        engine.collect([scheduler.remote_first_token("a", first_token(asked))])
        engine.now_s = 0.050
        engine.device.import_tokens(reserved.page_table, asked.prompt_token_ids, 0, 5)
        scheduler.kv_arrived("a")
        engine.now_s = 0.060
        finish(engine)

    assert tell(drive, "a", Role.DECODE) == [
        "request a: 5 prompt tokens, at most 3 new; added at 0.000 s",
        "+0 ms      waited 10 ms: its prefill worker has not begun with it",
        "+10 ms     its prefill worker has begun",
        "+10 ms     got 2 pages; KV of tokens [0, 5) has to come",
        "+20 ms     first token from its prefill worker",
        "+50 ms     its KV is complete",
        "+50 ms     waited 10 ms for the next step",
        "+60 ms     decoded in 2 steps: steps 0-1, 2 tokens",
        "+68 ms     finished: length, 3 tokens; queue 10 ms + prefill 10 ms + transfer 30 ms + decode 18 ms = 68 ms",
    ]


def test_nobody_works_on_a_prompt_between_two_prefill_workers(tell: Tell) -> None:
    asked = request("a", (1, 2, 3, 4, 5), 3)

    def drive(engine: FakeEngine) -> None:
        scheduler = engine.scheduler
        engine.add(asked, remote=True, is_open=False)
        for engine.now_s, is_ready in ((0.010, True), (0.030, False), (0.050, True)):
            scheduler.peer_ready("a", is_ready)
            engine.tick()
        engine.now_s = 0.060
        (reserved,) = scheduler.take_reserved()
        engine.collect([scheduler.remote_first_token("a", first_token(asked))])
        engine.now_s = 0.070
        engine.device.import_tokens(reserved.page_table, asked.prompt_token_ids, 0, 5)
        scheduler.kv_arrived("a")
        finish(engine)

    assert "; queue 30 ms + prefill 30 ms + transfer 10 ms + decode " in tell(drive, "a", Role.DECODE)[-1]


def test_kv_that_is_given_up_was_waited_for_and_its_prompt_waits_to_be_computed(tell: Tell) -> None:
    asked = request("a", (1, 2, 3, 4, 5), 3)

    def drive(engine: FakeEngine) -> None:
        scheduler = engine.scheduler
        engine.add(asked, remote=True, is_open=False)
        engine.now_s = 0.010
        scheduler.peer_ready("a")
        engine.tick()
        engine.now_s = 0.020
        engine.collect([scheduler.remote_first_token("a", first_token(asked))])
        engine.now_s = 0.050
        scheduler.compute_locally("a")
        engine.now_s = 0.060
        finish(engine)

    assert "; queue 20 ms + prefill 14 ms + transfer 30 ms + decode " in tell(drive, "a", Role.DECODE)[-1]


def test_of_several_steps_in_one_dispatch_the_tokens_that_it_wanted_are_told(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", (1, 2, 3), 4), request("b", (2, 3, 4), 12))
        finish(engine)

    story = tell(drive, "a", num_scheduler_steps=5)
    (decoded,) = (line for line in story if "decoded" in line)
    assert decoded.endswith("decoded in 1 step: step 1, 3 tokens")


def test_retraction_failure_and_cancel_are_told(tell: Tell) -> None:
    def start(engine: FakeEngine) -> None:
        for name in ("a", "b"):
            asked = request(name, (1, 2, 3, 4), 12)
            engine.add(asked, remote=True)
            engine.tick()
            (reserved,) = engine.scheduler.take_reserved()
            engine.collect([engine.scheduler.remote_first_token(name, first_token(asked))])
            engine.device.import_tokens(reserved.page_table, asked.prompt_token_ids, 0, 4)
            engine.scheduler.kv_arrived(name)

    def retract(engine: FakeEngine) -> None:
        start(engine)
        while not engine.scheduler.take_retracted():
            engine.tick()
            engine.now_s += TICK_S
        engine.collect([output for output in (engine.scheduler.fail("b", HandoffLost("gone")),) if output])
        engine.scheduler.cancel("a")
        while not engine.scheduler.is_idle():
            engine.tick()

    story = tell(retract, "b", Role.DECODE, num_pages=7, caching=False, local_prefill=False)
    assert any("  retracted in step" in line and "for request a (older)" in line for line in story), story
    assert "failed: HandoffLost: gone, " in story[-1]
    cancelled = tell(retract, "a", Role.DECODE, num_pages=7, caching=False, local_prefill=False)
    assert "cancelled while running" in cancelled[-1]


def test_the_prefill_role_ends_with_the_hand_over(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 21)), 5))
        for _ in range(4):
            engine.tick()
            engine.now_s += TICK_S
        assert engine.scheduler.counts()["publishing"] == 1
        engine.now_s = 0.100
        engine.scheduler.expire(engine.now_s)
        engine.scheduler.schedule(engine.now_s)
        engine.scheduler.cancel("a")
        finish(engine)

    story = tell(drive, "a", Role.PREFILL)
    assert story[1] == "+0 ms      prefilled in 2 chunks: steps 0-1, 20 tokens"
    assert story[-1].startswith("+100 ms    its hand-off was over while publishing, 1 token; queue 0 ms + prefill")
    assert story[-1].endswith("= 100 ms")


def test_the_end_of_a_hand_over_is_not_taken_for_the_coming_of_the_next_request(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 9)), 5))
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.now_s = 0.010
        engine.scheduler.cancel("a")
        engine.now_s = 2.0  # nothing to do until then
        engine.add(request("b", tuple(range(2, 9)), 5))
        engine.tick()
        engine.scheduler.cancel("b")
        finish(engine)

    assert tell(drive, "a", Role.PREFILL)[-1].endswith("= 10 ms")


def test_a_prompt_that_borrowed_has_given_up_no_prefill_worker(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 21)), 5))
        engine.scheduler.fetch_first("a", 16)
        engine.tick()
        engine.now_s = 0.020
        engine.tick()
        engine.scheduler.compute_locally("a")
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.scheduler.cancel("a")
        finish(engine)

    story = tell(drive, "a", Role.PREFILL)
    assert story[1].endswith("KV of its first tokens is fetched from the decode worker before it is computed")
    assert story[3] == "+20 ms     what could be fetched is here, the rest is to be computed"
    assert not any("prefill worker" in line for line in story)


def test_a_prompt_that_gives_its_pages_to_others_says_so(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 21)), 5))
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.now_s = 0.020
        assert engine.scheduler.park(("a",)) == "a"
        engine.seen.clear()
        for engine.now_s in (0.020, 0.050):
            engine.tick()
        engine.scheduler.unpark("a")
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.now_s = 0.100
        engine.tick()
        engine.scheduler.cancel("a")
        finish(engine)

    story = tell(drive, "a", Role.PREFILL, caching=False)
    assert story[1:3] == [
        "+0 ms      prefilled in 2 chunks: steps 0-1, 20 tokens",
        "+20 ms     its receiver has no memory yet: its pages go to waiting prompts",
    ]
    assert story[3] == "+20 ms     waited 30 ms: its receiver has no memory for its KV; waiting prompts got its pages"
    assert story[4] == "+50 ms     its receiver has memory: to be computed again"
    assert story[5].startswith("+50 ms     prefilled in 2 chunks: steps 3-4, 20 tokens")
    assert story[6] == (
        "+100 ms    its hand-off was over while publishing, 1 token; queue 30 ms + prefill 0 ms + transfer 70 ms = 100 ms"
    )
