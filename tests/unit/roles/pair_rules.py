"""A prefill worker and its decode workers as a hypothesis state machine: exact streams, one end each, nothing left."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jdisagg.core.errors import NumericalError
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request


class PairRules(RuleBasedStateMachine):
    """Random arrivals, choices of one request, cancels, deadlines, NaN, cut streams, lost pieces, uneven progress, deaths."""

    local_prefill = True

    def __init__(self) -> None:
        super().__init__()
        self.world: World
        self.wanted: dict[str, list[int]] = {}
        self.spoiled: set[str] = set()
        self.had_nan = False
        self.had_trouble = False  # between workers

    def some_decoder(self, number: int) -> int:
        """A decode worker that there is."""
        return number % len(self.world.decoders)

    @rule(
        length=st.integers(1, 30),
        first=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        to=st.integers(0, 1),
    )
    def submit(self, length: int, first: int, max_tokens: int, ignore_eos: bool, to: int) -> None:
        name = f"r{len(self.wanted)}"
        prompt = tuple(range(first, first + length))
        self.wanted[name] = expected(prompt, max_tokens, ignore_eos=ignore_eos)
        self.world.submit(request(name, prompt, max_tokens, ignore_eos=ignore_eos), to=self.some_decoder(to))

    @rule(
        length=st.sampled_from([3, 4, 5, 7, 8, 12, 13, 16, 20]),
        first=st.integers(1, 3),
        n=st.sampled_from([2, 3, 5]),
        max_tokens=st.sampled_from([1, 2, 5, 12]),
        to=st.integers(0, 1),
    )
    def submit_choices(self, length: int, first: int, n: int, max_tokens: int, to: int) -> None:
        """They share their prompt's KV, and get what they would get alone."""
        prompt, group = tuple(range(first, first + length)), f"g{len(self.wanted)}"
        for choice in range(n):
            name = f"r{len(self.wanted)}"
            self.wanted[name] = expected(prompt, max_tokens)
            asked = replace(request(name, prompt, max_tokens, fork_group=group), choice=choice)
            self.world.submit(asked, to=self.some_decoder(to))

    @rule(length=st.integers(1, 20), timeout_s=st.sampled_from([0.0, 0.02, 0.05, 0.2]))
    def submit_with_deadline(self, length: int, timeout_s: float) -> None:
        name = f"r{len(self.wanted)}"
        prompt = tuple(range(1, 1 + length))
        self.wanted[name] = expected(prompt, 9)
        self.spoiled.add(name)
        self.world.submit(request(name, prompt, 9, deadline_s=self.world.now_s + timeout_s))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.spoiled.add(name)
        self.world.cancel(name)

    @rule(number=st.integers(0, 1))
    def tick_decode(self, number: int) -> None:
        self.world.now_s += 0.01
        self.world.decoders[self.some_decoder(number)].engine.tick(self.world.now_s)

    @rule()
    def tick_prefill(self) -> None:
        self.world.now_s += 0.01
        self.world.prefill.tick(self.world.now_s)

    @rule(count=st.integers(1, 5))
    def transfer(self, count: int) -> None:
        for _ in range(count):
            self.world.network.step()

    @rule(count=st.integers(1, 8))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.world.tick()

    @precondition(lambda self: any(decoder.wire.open_streams for decoder in self.world.decoders))
    @rule(data=st.data(), reason=st.sampled_from(["dead", "heartbeat"]))
    def cut(self, data: st.DataObject, reason: str) -> None:
        streams = [
            (number, stream) for number, d in enumerate(self.world.decoders) for stream in sorted(d.wire.open_streams, key=repr)
        ]
        number, stream = data.draw(st.sampled_from(streams))
        self.had_trouble = True
        self.world.decoders[number].wire.cut(stream, reason)

    @precondition(lambda self: len(self.world.decoders) > 1)
    @rule(number=st.integers(0, 1))
    def decode_worker_dies(self, number: int) -> None:
        self.had_trouble = True
        self.spoiled.update(self.world.kill(number))

    @rule(count=st.integers(1, 4))
    def lose_pieces(self, count: int) -> None:
        self.had_trouble = True
        self.world.network.lose_next = count

    @rule(slots=st.sets(st.integers(0, 3), min_size=1), at_decode=st.booleans())
    def compute_nan(self, slots: set[int], at_decode: bool) -> None:
        """Whatever these slots compute next fails alone."""
        engine = self.world.decoders[0].engine if at_decode else self.world.prefill
        engine.runner.device.bad |= slots
        self.had_nan = True

    def teardown(self) -> None:
        if isinstance(sys.exc_info()[1], AssertionError):
            return  # there is nothing to add to it
        self.world.network.lose_next = 0
        for engine in (self.world.prefill, *(decoder.engine for decoder in self.world.decoders)):
            engine.runner.device.bad.clear()
        self.world.settle()
        for name, wanted in self.wanted.items():
            outputs = self.world.outputs[name]
            ends = [output for output in outputs if output.finish is not None]
            assert len(ends) <= 1, f"{name} ended twice"
            got = self.world.tokens(name)
            assert got == wanted[: len(got)], f"{name}: a wrong token"
            if self.had_nan and ends and isinstance(ends[0].error, NumericalError):
                continue
            if name in self.spoiled or (ends and ends[0].error is not None and self.had_trouble and not self.local_prefill):
                continue  # cancelled, timed out, or out of peers: what came was right
            assert ends, f"{name} never ended"
            assert ends[0].error is None, ends[0].error
            assert got == wanted
        if not self.had_trouble:
            rungs = [
                each.recoveries for name in self.wanted for output in self.world.outputs[name] if (each := output.provenance)
            ]
            assert not any(rungs), f"recovered from nothing: {rungs}"


class PairMachine(PairRules):
    """One prefill worker and one or two decode workers, of all sizes."""

    @initialize(
        num_decode=st.integers(1, 2),
        decode_pages=st.sampled_from([12, 12, 14, 18]),
        prefill_pages=st.sampled_from([9, 14, 24]),
        host_tokens=st.sampled_from([0, 24, 100]),
        reserved_decode_tokens=st.sampled_from([0, 0, 4]),
        caching=st.booleans(),
    )
    def start(self, **settings: Any) -> None:
        self.world = World(local_prefill=self.local_prefill, **settings)
