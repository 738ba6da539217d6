"""Conversations in random histories, with P borrowing whatever it can: every turn is exact, and nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.unit.roles.pair_rules import PairRules
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep")


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
