"""Late outputs come as they would: before the first output of the attempt that replaced theirs."""

from jdisagg.core.drill import Drill
from jdisagg.core.requests import FinishReason, Output
from jdisagg.router.drill import with_late_outputs


def say(attempt: int, token: int, finish: FinishReason | None = None) -> Output:
    return Output(request_id="r", attempt=attempt, token_ids=(token,), finish=finish)


def heard(*kinds: str) -> list[tuple[int, tuple[int, ...]]]:
    got: list[Output] = []
    deliver = with_late_outputs(got.extend, Drill(rates=dict.fromkeys(kinds, 1.0)))
    deliver([say(0, 1), say(0, 2)])
    deliver([say(1, 3)])
    deliver([say(1, 4, FinishReason.LENGTH)])
    deliver([say(2, 5)])  # another request of the same name
    return [(output.attempt, output.token_ids) for output in got]


def test_without_a_drill_nothing_is_added() -> None:
    assert heard() == [(0, (1,)), (0, (2,)), (1, (3,)), (1, (4,)), (2, (5,))]


def test_a_late_output_bears_its_own_number() -> None:
    assert heard("late_output") == [(0, (1,)), (0, (2,)), (0, (2,)), (1, (3,)), (1, (4,)), (2, (5,))]


def test_with_attempts_ignored_it_bears_the_new_one() -> None:
    assert heard("attempts_ignored") == [(0, (1,)), (0, (2,)), (1, (2,)), (1, (3,)), (1, (4,)), (2, (5,))]
