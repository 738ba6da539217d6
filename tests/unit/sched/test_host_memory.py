"""The ledger of host copies: room, and what the runner is told to forget."""

from __future__ import annotations

import pytest

from jdisagg.sched.host_memory import HostMemory
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import request


def named(request_id: str) -> Sequence:
    return Sequence(request=request(request_id, (1,)), order=(0.0, 0), status=Status.RUNNING, target=1, stop_ids=frozenset())


def test_room_is_given_to_the_last_token_and_comes_back() -> None:
    host, a, b = HostMemory(10), named("a"), named("b")
    assert host.keep(a, 6)
    assert not host.keep(b, 5)
    assert host.keep(b, 4)
    assert (host.used_tokens, a.wait.host_tokens, b.wait.host_tokens) == (10, 6, 4)
    host.restored(a)
    assert (host.used_tokens, a.wait.host_tokens) == (4, 0)
    assert host.take_forgotten() == ()  # a plan took it back, nobody has to be told
    assert host.keep(a, 6)


def test_nothing_is_not_kept() -> None:
    host = HostMemory(10)
    assert not host.keep(named("a"), 0)
    assert host.used_tokens == 0


def test_a_dropped_copy_is_told_once_and_one_that_was_never_made_never() -> None:
    host, a, b = HostMemory(10), named("a"), named("b")
    host.keep(a, 1)
    host.keep(b, 2)
    assert not host.has_forgotten
    for _ in range(2):
        host.drop(b)
        host.drop(named("never-kept"))
    host.drop(a)
    assert host.has_forgotten
    assert host.take_forgotten() == ("b", "a")
    assert (host.has_forgotten, host.take_forgotten(), host.used_tokens) == (False, (), 0)


def test_two_copies_of_one_sequence_are_a_bug() -> None:
    host, a = HostMemory(10), named("a")
    host.keep(a, 1)
    with pytest.raises(AssertionError, match="a has a host copy already"):
        host.keep(a, 1)
