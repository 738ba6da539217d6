"""How times, counts and steps read in text for people."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """1 page, 2 pages."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def step_range(steps: list[int]) -> str:
    """Step ids, ascending, as short as they can be said."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]}-{steps[-1]}"
    if len(steps) <= 8:
        return f"steps {', '.join(str(step) for step in steps)}"
    return f"{len(steps)} of steps {steps[0]}-{steps[-1]}"


def in_ms(seconds: float) -> str:
    """In ms, from 10 s on in s."""
    if seconds >= 10.0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 or not seconds else f"{seconds * 1e3:.1f} ms"
