"""KV from D to P: the second turn of a chat computes and sends only what is new, and survives what goes wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from jdisagg.core.requests import Provenance, SamplingParams
from jdisagg.handoff.messages import ChunkReady, HandoffId, Open
from jdisagg.roles import engine_loop
from jdisagg.transfer.base import Piece
from tests.unit.roles.network_fake import BYTES_PER_TOKEN
from tests.unit.roles.pair_rules import PairRules
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)


PROMPT = tuple(range(3, 14))  # 11 tokens
QUESTION = (7, 8)


def first_turn(world: World, max_tokens: int = 14) -> tuple[int, ...]:
    """Serve it; returns the prompt of the second turn. D has KV of all but the answer's last token."""
    world.submit(request("t1", PROMPT, max_tokens, ignore_eos=True))
    world.settle()
    answer = expected(PROMPT, max_tokens, ignore_eos=True)
    assert world.tokens("t1") == answer
    return (*PROMPT, *answer, *QUESTION)


def read(engine: Any, name: str) -> float:
    """Sum over labels."""
    samples = (sample for metric in engine.metrics.registry.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def moved(world: World) -> tuple[float, float, int]:
    """So far: bytes from P to D, from D to P, tokens that P computed."""
    name = "jdisagg_transfer_bytes_total"
    return read(world.decode, name), read(world.prefill, name), world.prefill.scheduler.stats.prefill_tokens


def since(world: World, before: tuple[float, float, int]) -> tuple[float, float, int]:
    """The same since `before`, bytes as tokens."""
    down, up, computed = (now - then for now, then in zip(moved(world), before, strict=True))
    return down / BYTES_PER_TOKEN, up / BYTES_PER_TOKEN, int(computed)


def provenance_of(world: World, request_id: str) -> Provenance:
    provenance = world.outputs[request_id][-1].provenance
    assert provenance is not None
    return provenance


def serve_second_turn(world: World, prompt: tuple[int, ...]) -> tuple[float, float, int]:
    """Serve it and check its tokens; returns what moved."""
    before = moved(world)
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    world.settle()
    assert world.tokens("t2") == expected(prompt, 4, ignore_eos=True)
    return since(world, before)


def test_second_turn_moves_and_computes_exactly_what_is_missing() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    held = (len(PROMPT) + 14 - 1) // 4 * 4  # full pages at D
    cached = len(PROMPT) // 4 * 4  # full pages at P
    missing = len(prompt) - held
    assert serve_second_turn(world, prompt) == (missing, held - cached, missing)
    provenance = provenance_of(world, "t2")
    assert provenance.prefilled_tokens == provenance.transferred_tokens == missing
    assert (provenance.borrowed_tokens, provenance.borrowed_bytes) == (held - cached, (held - cached) * BYTES_PER_TOKEN)
    assert world.outputs["t2"][-1].cached_tokens == held
    assert read(world.prefill, "jdisagg_borrowed_tokens_total") == held - cached
    assert world.decode.scheduler.stats.prefill_tokens == 0


def test_third_turn_finds_what_was_borrowed_in_the_prefix_cache_of_p() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world, max_tokens=8)
    serve_second_turn(world, prompt)
    answer = expected(prompt, 4, ignore_eos=True)
    before = moved(world)
    third = (*prompt, *answer, 9)
    world.submit(request("t3", third, 3, ignore_eos=True))
    world.settle()
    held = (len(third) - 2) // 4 * 4  # the last token of the second answer was never fed
    down, up, computed = since(world, before)
    assert world.tokens("t3") == expected(third, 3, ignore_eos=True)
    assert (down, computed) == (len(third) - held, len(third) - held)
    assert up == held - len(prompt) // 4 * 4


@pytest.mark.parametrize(
    "options",
    [{"want_min_tokens": 0}, {"want_min_tokens": 13}, {"want_min_tokens": 4, "dtypes": ("float32", "bfloat16")}],
    ids=["off", "too little", "unlike dtypes"],
)
def test_what_is_not_worth_it_or_not_equal_is_computed(options: dict[str, Any]) -> None:
    world = World(local_prefill=False, **options)
    prompt = first_turn(world)
    held, cached = 24, 8
    if options["want_min_tokens"] == 13:
        prompt = prompt[:21]  # D holds 20 of it, 12 more than P
        held = 20
    down, up, computed = serve_second_turn(world, prompt)
    assert (down, up, computed) == (len(prompt) - held, 0, len(prompt) - cached)
    assert provenance_of(world, "t2").borrowed_tokens == 0


def test_prompt_logprobs_are_computed_at_every_position() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    before = moved(world)
    asked = request("t2", prompt, 4)
    asked = type(asked)(
        request_id="t2", prompt_token_ids=prompt, deadline_s=asked.deadline_s,
        sampling=SamplingParams(max_tokens=4, prompt_logprobs=0, ignore_eos=True),
    )  # fmt: skip
    world.submit(asked)
    world.settle()
    assert since(world, before)[1:] == (0, len(prompt))


@pytest.mark.parametrize("extra", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (2, 4)], ids=["equal pages", "larger at P", "smaller at P"])
def test_prompts_that_end_where_the_held_ones_do(extra: int, sizes: tuple[int, int]) -> None:
    """D holds all of it, all but the last token, or ends within a page of either side: P computes at least one token."""
    world = World(local_prefill=False, want_min_tokens=1, prefill_pages=30, prefill_page_size=sizes[0])
    prompt = first_turn(world)[: 20 + extra]
    page = sizes[0]
    held = len(prompt) // 4 * 4
    cached = len(PROMPT) // page * page
    usable = min(held, len(prompt) - 1) // page * page
    assert serve_second_turn(world, prompt) == (len(prompt) - held, usable - cached, len(prompt) - usable)


@pytest.mark.parametrize(("num_lost", "num_borrowed"), [(1, 16), (2, 16), (9, 0)])
def test_lost_pieces_are_fetched_once_more_and_then_computed(num_lost: int, num_borrowed: int) -> None:
    """Two pieces: one loss, one of each, and the same one twice."""
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    world.network.lose_lent = num_lost
    assert serve_second_turn(world, prompt) == (len(prompt) - 24, num_borrowed, len(prompt) - 8 - num_borrowed)


def test_what_arrived_before_a_loss_is_not_computed() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    before = moved(world)
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    while since(world, before)[1] == 0:
        world.tick()
    world.network.lose_lent = 9
    world.settle()
    assert world.tokens("t2") == expected(prompt, 4, ignore_eos=True)
    assert since(world, before) == (len(prompt) - 24, 8, len(prompt) - 16)
    assert provenance_of(world, "t2").borrowed_tokens == 8


def test_a_silent_receiver_costs_p_a_second_and_no_more() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    publish = world.lent.publish
    world.lent.publish = lambda *_: None  # type: ignore[method-assign,misc]  # never published, never failed
    down, up, computed = serve_second_turn(world, prompt)
    world.lent.publish = publish  # type: ignore[method-assign]
    assert (down, up, computed) == (len(prompt) - 24, 0, len(prompt) - 8)
    assert world.prefill.metrics.transfer.borrowings.labels(outcome="stalled")._value.get() == 1


@pytest.mark.covers("I-3", "X17")
@pytest.mark.parametrize("num_ticks", range(1, 14))
@pytest.mark.parametrize("what", ["cut", "cancel", "expire"])
def test_the_end_of_a_borrowing_handoff_frees_both_sides(num_ticks: int, what: str) -> None:
    world = World(local_prefill=True, want_min_tokens=4)
    prompt = first_turn(world)
    deadline_s = world.now_s + 0.02 * num_ticks if what == "expire" else 1e9
    world.submit(request("t2", prompt, 4, ignore_eos=True, deadline_s=deadline_s))
    for _ in range(num_ticks):
        world.tick()
    if what == "cancel":
        world.cancel("t2")
    for handoff in list(world.wire.open_streams) if what == "cut" else []:
        world.wire.cut(handoff, "dead")
    world.settle()
    got = world.tokens("t2")
    assert got == expected(prompt, 4, ignore_eos=True)[: len(got)]
    assert len(got) == 4 or what != "cut"


def test_a_full_pool_at_p_is_waited_for_and_nobody_waits_for_ever() -> None:
    world = World(local_prefill=False, want_min_tokens=4, prefill_pages=10, decode_pages=30)
    prompt = first_turn(world)
    for name in ("a", "b"):
        world.submit(request(name, tuple(range(20, 44)), 4, ignore_eos=True))
    serve_second_turn(world, prompt)
    assert world.tokens("a") == world.tokens("b") == expected(tuple(range(20, 44)), 4, ignore_eos=True)


def test_two_that_lend_give_way_to_one_that_needs_the_pages_of_both() -> None:
    """Their peer borrows and has not begun; the first to give way leaves room in the buffer for what the other lends."""
    world = World(local_prefill=False, decode_pages=18, prefill_pages=60, want_min_tokens=4, scheduling_policy="priority")
    asked = {}
    for number, prompt in enumerate((PROMPT, PROMPT[::-1])):
        world.submit(request(f"t{number}", prompt, 14))
        world.settle()
        asked[f"late{number}"] = (*prompt, *world.tokens(f"t{number}"), *QUESTION)
    world.prefill.scheduler.reset_prefix_cache()
    asked["long"] = tuple(range(1, 45))
    for priority, name in ((1, "late0"), (0, "late1"), (2, "long")):
        world.submit(request(name, asked[name], 4, priority=priority))
        for _ in range(4):  # the transfer stands still
            world.prefill.tick(world.now_s)
            world.decode.tick(world.now_s)
    assert world.decode.scheduler.counts()["transfer"] == 1, "the long one has its pages"
    world.settle()
    assert {name: world.tokens(name) for name in asked} == {name: expected(prompt, 4) for name, prompt in asked.items()}


class MirrorMachine(PairRules):
    """The pair's random histories, with P borrowing whatever it can, and conversations that go on."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(local_prefill=self.local_prefill, decode_pages=22, prefill_pages=14, want_min_tokens=1)
        self.turns: dict[str, tuple[int, ...]] = {}
        for first, length in ((1, 4), (2, 7)):  # histories are short: conversations have begun
            self._talk(tuple(range(first, first + length)), 12)
            self.world.settle()

    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def next_turn(self, data: st.DataObject, max_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.turns)))
        self._talk((*self.turns[name], *self.world.tokens(name), 5), max_tokens)

    def _talk(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        if len(prompt) + max_tokens > 40:
            return
        name = f"r{len(self.wanted)}"
        self.turns[name] = prompt
        self.wanted[name] = expected(prompt, max_tokens, ignore_eos=True)
        self.world.submit(request(name, prompt, max_tokens, ignore_eos=True))

    @rule(count=st.integers(1, 2))
    def lose_lent_pieces(self, count: int) -> None:
        self.world.network.lose_lent = count

    def teardown(self) -> None:
        self.world.network.lose_lent = 0
        super().teardown()


class StrictMirrorMachine(MirrorMachine):
    """The same with a decode worker that must not prefill."""

    local_prefill = False


@pytest.mark.covers("I-3", "I-4")
@pytest.mark.parametrize("machine", [MirrorMachine, StrictMirrorMachine], ids=["on-failure", "never"])
def test_every_conversation_ends_exact_and_quiescent(machine: type[PairRules]) -> None:
    assert run_state_machine_as_test(machine) is None  # the machine's teardown asserts


@pytest.mark.covers("C03")
@pytest.mark.parametrize("num_ticks", range(2, 8))
def test_a_lost_stream_goes_on_from_what_is_in_place_and_the_next_peer_borrows_that(num_ticks: int) -> None:
    """Cut in the middle of the transfer, and the next P knows nothing: what is in place at D is neither sent nor computed."""
    world = World(local_prefill=False, want_min_tokens=4)
    held: list[int] = []
    open_stream = world.wire.open

    def record(peer: str, handoff: HandoffId, message: Open) -> None:
        held.append(message.held_tokens)
        open_stream(peer, handoff, message)

    world.wire.open = record  # type: ignore[method-assign]
    prompt = tuple(range(1, 40))
    world.submit(request("a", prompt, 4, ignore_eos=True))
    for _ in range(num_ticks):
        world.tick()
    for handoff in list(world.wire.open_streams):
        world.wire.cut(handoff, "dead")
    world.prefill.tick(world.now_s)
    world.prefill.scheduler.reset_prefix_cache()
    before = moved(world)
    world.settle()
    assert world.tokens("a") == expected(prompt, 4, ignore_eos=True)
    assert len(held) == 2
    provenance, borrowed = provenance_of(world, "a"), held[1] // 4 * 4
    assert provenance.transferred_tokens == len(prompt), "nothing came twice"
    assert provenance.borrowed_tokens == borrowed
    assert since(world, before)[1:] == (borrowed, len(prompt) - borrowed)


def test_the_first_piece_is_at_d_before_the_last_chunk_is_planned() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", tuple(range(1, 46)), 2))  # four chunks of at most 12 tokens
    planned_before = 0
    while read(world.decode, "jdisagg_transfer_bytes_total") == 0:
        planned_before = world.prefill.scheduler.stats.prefill_tokens
        world.prefill.tick(world.now_s)
        for _ in range(3):  # messages are faster than a chunk
            world.network.step()
            world.decode.tick(world.now_s)
    assert 0 < planned_before < 45
    world.settle()
    assert read(world.decode, "jdisagg_transfer_bytes_total") == 45 * BYTES_PER_TOKEN


def test_a_piece_that_d_lends_before_p_has_pages_for_it_costs_p_no_more_than_the_borrowing() -> None:
    world = World(local_prefill=False, want_min_tokens=4, prefill_pages=12)
    prompt = first_turn(world)
    world.submit(request("hog", tuple(range(20, 48)), 4, ignore_eos=True))
    while not world.prefill.scheduler.counts()["running"]:
        world.tick()
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    while not world.borrower.snapshot():
        world.tick()
    (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "t2"]
    cells = cast(Any, [SimpleNamespace(position=position) for position in range(8, 16)])
    world.network.pieces["early"] = Piece(begin=8, end=16, data=cells)
    early = ChunkReady(key="early", begin=8, end=16, shape=(1, 8, 1, 1), dtype="float32", num_bytes=32, checksum=1)
    world.wire.send(stream, early)
    world.settle()
    assert world.tokens("t2") == expected(prompt, 4, ignore_eos=True)
