"""What is asked, and when: prompts that have much, little or nothing in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from route_bench.workers import Simulation, Tokens

Start = Callable[[Simulation, Random, float], None]  # with so many requests a second


@dataclass(frozen=True, slots=True)
class Load:
    """`per_s`: requests a second and prefill worker that keep it busy for three quarters of its time, were caches ideal; where
    they are too small to help much, all the same; "idle" ones have less to do."""

    name: str
    per_s: float
    start: Start
    cache_tokens: int | None = None  # of each worker, whatever is asked for; None: as is asked for


def words(draw: Random, num_tokens: int) -> Tokens:
    """A text nobody else has."""
    return tuple(draw.choices(range(1000, 30_000), k=num_tokens))


def questions(num: int, *, system: int, texts: int, lengths: tuple[int, int]) -> Start:
    """Each behind a system prompt and one of so many texts; without any, behind one of its own."""

    def start(simulation: Simulation, draw: Random, per_s: float) -> None:
        head, when_s = words(draw, system), 0.0
        library = [words(draw, draw.randint(*lengths)) for _ in range(texts)]
        for _ in range(num):
            when_s += draw.expovariate(per_s)
            text = draw.choice(library) if library else words(draw, draw.randint(*lengths))
            prompt, num_out = head + text + words(draw, draw.randint(40, 90)), draw.randint(32, 96)
            simulation.at(when_s, lambda prompt=prompt, num_out=num_out: simulation.arrive(prompt, num_out))

    return start


def bursts(num: int, *, size: int, lengths: tuple[int, int], within_s: float) -> Start:
    """So many questions about one new text, all at once."""

    def start(simulation: Simulation, draw: Random, per_s: float) -> None:
        when_s = 0.0
        for _ in range(num):
            when_s += draw.expovariate(per_s / size)
            text = words(draw, draw.randint(*lengths))
            for _ in range(size):
                prompt, num_out = text + words(draw, draw.randint(40, 90)), draw.randint(32, 96)
                at_s = when_s + draw.uniform(0.0, within_s)
                simulation.at(at_s, lambda prompt=prompt, num_out=num_out: simulation.arrive(prompt, num_out))

    return start


def conversations(num: int, *, history: tuple[int, int], branches: int, turns: int, pause_s: float) -> Start:
    """Behind one system prompt; each has a first turn as long as `history`, and then goes on in so many branches."""

    def start(simulation: Simulation, draw: Random, per_s: float) -> None:
        head, when_s = words(draw, 200), 0.0
        for _ in range(num):
            when_s += draw.expovariate(per_s / (1 + branches * turns))
            own = Random(draw.random())
            first = head + words(own, own.randint(*history))
            simulation.at(when_s, lambda first=first, own=own: begin(simulation, own, first))

    def begin(simulation: Simulation, own: Random, first: Tokens) -> None:
        def then(text: Tokens) -> None:
            for _ in range(branches):
                go_on(simulation, own, text, turns)

        simulation.arrive(first, own.randint(40, 150), then)

    def go_on(simulation: Simulation, own: Random, text: Tokens, left: int) -> None:
        def ask() -> None:
            simulation.arrive(text + words(own, own.randint(50, 400)), own.randint(40, 150), then)

        def then(more: Tokens) -> None:
            if left > 1:
                go_on(simulation, own, more, left - 1)

        simulation.at(simulation.now_s + own.expovariate(1 / pause_s), ask)

    return start


LOADS = (
    Load("documents", 34.0, questions(1200, system=200, texts=40, lengths=(2000, 8000))),
    Load("templates", 75.0, questions(2000, system=200, texts=12, lengths=(1300, 1300))),
    Load("branches", 21.0, conversations(40, history=(2000, 4000), branches=4, turns=6, pause_s=0.3)),
    Load("chats", 50.0, conversations(150, history=(50, 300), branches=1, turns=7, pause_s=3.0)),
    Load("all distinct", 4.0, questions(1000, system=0, texts=0, lengths=(500, 4000))),
    Load("bursts", 17.0, bursts(100, size=12, lengths=(2000, 8000), within_s=0.1)),
    Load("idle bursts", 3.0, bursts(100, size=12, lengths=(2000, 8000), within_s=0.1)),
    Load("40, small pool", 2.2, questions(1200, system=200, texts=40, lengths=(2000, 8000)), 11_000),
    Load("150, small pool", 1.9, questions(1200, system=200, texts=150, lengths=(2000, 8000)), 11_000),
    Load("400, small pool", 1.8, questions(1200, system=200, texts=400, lengths=(2000, 8000)), 11_000),
    Load("40, half cached", 3.8, questions(1200, system=200, texts=40, lengths=(2000, 8000)), 30_000),
    Load("one hot prefix", 85.0, questions(2500, system=0, texts=1, lengths=(4000, 4000))),
)
