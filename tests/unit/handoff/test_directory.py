"""Prefill workers for requests that name none."""

import pytest

from jdisagg.core.fleet import MAX_PREFILL_PEERS
from jdisagg.handoff.directory import PrefillDirectory


def test_named_ones_come_first_and_routers_add_theirs_once() -> None:
    directory = PrefillDirectory(("s:1",))
    assert directory.candidates == ("s:1",)
    directory.learn("r:1", ("p:1", "s:1"))
    directory.learn("r:2", ("p:2", "p:1"))
    assert directory.told == ("p:2", "p:1", "s:1")
    assert directory.candidates == ("s:1", "p:2", "p:1")


def test_a_router_that_says_something_else_is_believed_and_one_that_is_gone_stays() -> None:
    directory = PrefillDirectory(())
    directory.learn("gone:1", ("p:1",))
    directory.learn("r:2", ("p:1", "p:2"))
    directory.learn("r:2", ("p:3",))
    assert directory.told == ("p:3", "p:1")
    directory.learn("r:2", ())
    assert directory.candidates == ("p:1",)


def test_what_a_router_said_that_is_gone_neither_hides_nor_orders_what_the_others_say() -> None:
    directory = PrefillDirectory(())
    directory.learn("gone:1", tuple(f"old:{number}" for number in range(MAX_PREFILL_PEERS)))
    directory.learn("r:2", ("p:1", "p:2"))
    assert directory.candidates == ("p:1", "p:2", "old:0", "old:1")
    directory.learn("gone:1", ("p:1", "p:2"))
    directory.learn("r:2", ("p:2", "p:1"))
    assert directory.candidates == ("p:2", "p:1"), "p:2 has less to do now"


def test_one_request_tries_the_best_few() -> None:
    directory = PrefillDirectory(())
    everybody = tuple(f"p:{number}" for number in range(20))
    directory.learn("r:1", everybody)
    assert directory.told == everybody
    assert directory.candidates == everybody[:MAX_PREFILL_PEERS]


@pytest.mark.parametrize(
    ("static", "told", "failures", "reason"),
    [
        ((), (), {}, "no router knows one"),
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
    directory.learn("r:1", told)
    assert directory.not_ready_reason(failures) == (f"no usable prefill worker ({reason})" if reason else "")
