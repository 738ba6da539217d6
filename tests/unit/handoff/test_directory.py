"""Prefill workers for requests that name none."""

import pytest

from jdisagg.core.fleet import MAX_PREFILL_PEERS
from jdisagg.handoff.directory import SILENT_S, PrefillDirectory


def best(directory: PrefillDirectory) -> tuple[str, ...]:
    """While all are reached."""
    return directory.candidates(lambda peer: False)


def test_named_ones_come_first_and_routers_add_theirs_once() -> None:
    directory = PrefillDirectory(("s:1",))
    assert best(directory) == ("s:1",)
    directory.learn("r:1", ("p:1", "s:1"), {}, 0.0)
    directory.learn("r:2", ("p:2", "p:1"), {}, 0.0)
    assert directory.told == ("p:2", "p:1", "s:1")
    assert best(directory) == ("s:1", "p:2", "p:1")


def test_a_router_that_says_something_else_is_believed_and_one_that_is_gone_stays() -> None:
    directory = PrefillDirectory(())
    directory.learn("gone:1", ("p:1",), {}, 0.0)
    directory.learn("r:2", ("p:1", "p:2"), {}, 0.0)
    directory.learn("r:2", ("p:3",), {}, 0.0)
    assert directory.told == ("p:3", "p:1")
    directory.learn("r:2", (), {}, 0.0)
    assert best(directory) == ("p:1",)


def test_what_a_router_said_that_is_gone_neither_hides_nor_orders_what_the_others_say() -> None:
    directory = PrefillDirectory(())
    directory.learn("gone:1", tuple(f"old:{number}" for number in range(MAX_PREFILL_PEERS)), {}, 0.0)
    directory.learn("r:2", ("p:1", "p:2"), {}, 0.0)
    assert best(directory) == ("p:1", "p:2", "old:0", "old:1")
    directory.learn("gone:1", ("p:1", "p:2"), {}, 0.0)
    directory.learn("r:2", ("p:2", "p:1"), {}, 0.0)
    assert best(directory) == ("p:2", "p:1"), "p:2 has less to do now"


def test_of_a_router_that_is_silent_while_another_speaks_those_go_that_cannot_be_used() -> None:
    directory, failures = PrefillDirectory(()), {"dead:1": "gone", "alive:1": ""}
    directory.learn("gone:1", ("dead:1", "alive:1", "unknown:1"), {}, 100.0)
    directory.learn("r:2", ("p:1",), failures, 100.0 + SILENT_S - 1)
    assert directory.told == ("p:1", "dead:1", "alive:1", "unknown:1"), "it may be back any moment"
    directory.learn("r:2", ("p:1",), failures, 100.0 + SILENT_S)
    assert directory.told == ("p:1", "alive:1", "unknown:1")
    directory.learn("r:2", ("p:1",), failures | {"alive:1": "gone"}, 100.0 + 2 * SILENT_S)
    assert directory.told == ("p:1", "unknown:1")
    directory.learn("gone:1", ("dead:1",), failures, 100.0 + 2 * SILENT_S)
    assert directory.told == ("dead:1", "p:1")
    directory.learn("r:2", ("p:1",), failures, 100.0 + 2 * SILENT_S + 1)
    assert directory.told == ("p:1", "dead:1"), "a router that speaks is believed"


def test_of_routers_that_have_nothing_to_say_any_more_nothing_is_kept() -> None:
    """One behind a name has a new address each time that it is started, and is let go with no workers."""
    directory = PrefillDirectory(())
    for number in range(50):
        directory.learn(f"10.0.0.{number}:1", ("p:1",), {}, float(number))
        directory.learn(f"10.0.0.{number}:1", (), {}, float(number))
    directory.learn("gone:1", ("dead:1",), {}, 100.0)
    directory.learn("r:2", ("p:2",), {"dead:1": "gone"}, 100.0 + SILENT_S)
    assert directory._by_router == {"r:2": (("p:2",), 100.0 + SILENT_S)}
    directory.learn("10.0.0.7:1", ("p:3",), {}, 200.0)
    assert best(directory) == ("p:3", "p:2"), "it is there again"


def test_one_request_tries_the_best_few() -> None:
    directory = PrefillDirectory(())
    everybody = tuple(f"p:{number}" for number in range(20))
    directory.learn("r:1", everybody, {}, 0.0)
    assert directory.told == everybody
    assert best(directory) == everybody[:MAX_PREFILL_PEERS]


def test_one_request_tries_those_that_are_reached_however_many_are_not() -> None:
    directory = PrefillDirectory(("s:1",))
    everybody = tuple(f"p:{number}" for number in range(2 * MAX_PREFILL_PEERS))
    unreached, reached = everybody[:MAX_PREFILL_PEERS], everybody[MAX_PREFILL_PEERS:]
    directory.learn("r:1", everybody, {}, 0.0)
    assert directory.candidates(unreached.__contains__) == ("s:1", *reached)
    assert directory.candidates(everybody[1:].__contains__) == ("s:1", *everybody[:MAX_PREFILL_PEERS])


@pytest.mark.parametrize(
    ("static", "told", "failures", "reason"),
    [
        ((), (), {}, "no router knows one that pairs with this worker"),
        ((), ("p:1",), {}, ""),
        ((), ("p:1",), {"p:1": ""}, ""),
        ((), ("p:1", "p:2"), {"p:1": "frozen"}, ""),
        ((), ("p:1",), {"p:1": "frozen", "gone:1": ""}, "p:1: frozen"),
        (("s:1",), (), {}, "none has answered yet"),
        (("s:1",), (), {"s:1": ""}, ""),
        (("s:1", "s:2"), (), {"s:1": "frozen", "s:2": ""}, ""),
        (("s:1",), (), {"s:1": "frozen"}, "s:1: frozen"),
        (("s:1",), ("p:1",), {"s:1": "frozen", "p:1": "refused"}, "s:1: frozen; p:1: refused"),
        (("s:1",), (), {"s:1": "prefill peer s:1: Hello: UNAVAILABLE"}, "s:1: Hello: UNAVAILABLE"),
    ],
)
def test_a_router_s_worker_counts_until_it_failed_and_a_named_one_once_it_answered(
    static: tuple[str, ...], told: tuple[str, ...], failures: dict[str, str], reason: str
) -> None:
    directory = PrefillDirectory(static)
    directory.learn("r:1", told, {}, 0.0)
    assert directory.not_ready_reason(failures) == (f"no usable prefill worker ({reason})" if reason else "")


def test_the_reason_names_a_few_of_many() -> None:
    """It goes out with every heartbeat."""
    directory, many = PrefillDirectory(()), tuple(f"p:{number}" for number in range(1000))
    directory.learn("r:1", many, {}, 0.0)
    reason = directory.not_ready_reason(dict.fromkeys(many, "frozen"))
    assert reason == "no usable prefill worker (p:0: frozen; p:1: frozen; p:2: frozen; p:3: frozen; 996 more)"
