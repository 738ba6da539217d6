"""Which lost attempts are followed by another, after how long, and what they cost: no worker, no clock."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from jdisagg.api.worker.client import SILENT
from jdisagg.core.errors import DeadlineExceeded, Deadly, HandoffLost, Overloaded, Quarantined, RequestError, Unavailable
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Output
from jdisagg.router.entry import Entry
from jdisagg.router.flight import Flight
from jdisagg.router.recovery import FAILED_EVERY_S, FAILED_FIRST, ReplayConfig, Replays
from jdisagg.router.setbacks import MOST_ASKED, Lost, Setbacks
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import member, request

FIRST = Output(request_id="r1", token_ids=(7,))


class Rig:
    """One request, and the brakes of a router whose clock stands unless told."""

    def __init__(self, *, num_live: int = 100, **config: Any) -> None:
        self.metrics = Metrics(engine=False)
        self.replays = Replays(ReplayConfig(**config), self.metrics, worker_wait_s=30.0)
        self.flight = Flight(request("r1"))
        self.num_live = num_live

    def lose(self, error: RequestError, *, alone: bool = False, now_s: float = 0.0) -> float:
        """A worker gave it back."""
        return self._next(Lost.told(error), alone, now_s)

    def die(self, number: int, reason: str = "connection reset", *, alone: bool = False) -> float:
        """That worker went down under it."""
        lost = Lost(HandoffLost(f"d{number} was lost"), death=True, worker=(f"d{number}", "epoch"), reason=reason)
        return self._next(lost, alone, 0.0)

    def _next(self, lost: Lost, alone: bool, now_s: float) -> float:
        before = self.flight.attempt
        self.flight.hear(lost)
        pause_s = self.replays.next_attempt(self.flight, lost, worker="d", alone=alone, num_live=self.num_live, now_s=now_s)
        assert self.flight.attempt == before + 1
        return pause_s

    def deliver(self) -> None:
        """Its client gets a token."""
        self.flight.accept(Output(request_id="r1", attempt=self.flight.attempt, token_ids=(7,)))

    def count(self, name: str) -> float:
        (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", self.metrics.text(), re.MULTILINE)
        return float(found)


REPLAYS = 'jdisagg_recoveries_total{rung="replay"}'


def test_a_request_may_be_given_back_so_often_and_ends_with_the_next_reason() -> None:
    rig = Rig(max_refusals=3)
    for _ in range(3):
        rig.lose(Unavailable("it drains"))
    with pytest.raises(HandoffLost, match="the last straw"):
        rig.lose(HandoffLost("the last straw"))
    assert rig.flight.attempt == 3


def test_deaths_do_not_count_as_giving_back_nor_that_as_deaths() -> None:
    rig = Rig(max_refusals=1, max_deaths=2)
    rig.lose(Unavailable("it drains"))
    rig.die(1)
    with pytest.raises(HandoffLost, match=r"in flight when 2 workers went down \(last: d2 was lost\)"):
        rig.die(2)


def test_pauses_before_the_same_workers_are_asked_again_double_up_to_two_seconds() -> None:
    rig = Rig()
    pauses = [rig.lose(HandoffLost("no prefill worker"), alone=True) for _ in range(8)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def test_nobody_pauses_who_has_another_worker_to_ask_or_whose_worker_died() -> None:
    rig = Rig()
    assert rig.lose(HandoffLost("no prefill worker")) == 0.0
    assert rig.die(1, alone=True) == 0.0


def test_each_of_many_full_workers_is_asked_once_and_only_then_are_refusals_counted() -> None:
    rig = Rig(max_refusals=2)
    pauses = [rig.lose(Overloaded("full", retry_after_s=5.0)) for _ in range(20)]
    assert pauses == [0.0] * 20
    with pytest.raises(Overloaded):
        rig.lose(Overloaded("the last one", retry_after_s=5.0), alone=True)
    many = Rig(max_refusals=2)
    for _ in range(MOST_ASKED - 1):
        many.lose(Overloaded("full"))
    with pytest.raises(Overloaded):
        many.lose(Overloaded("one of thousands"))
    accepted = Rig(max_refusals=2)
    accepted.die(1)  # it waited there, and goes on asking while the others are full
    for _ in range(20):
        accepted.lose(Overloaded("full"))
    assert accepted.lose(Overloaded("full"), alone=True) == 0.1
    assert accepted.lose(Overloaded("another one, again")) == 0.2
    with pytest.raises(Overloaded):
        accepted.lose(Overloaded("full"), alone=True)


@pytest.mark.parametrize("order", [(5.0, 3.0, 7.0), (3.0, 5.0, 7.0), (7.0, 5.0, 3.0)])
def test_the_client_of_a_full_fleet_hears_the_soonest_time_that_any_worker_named(order: tuple[float, ...]) -> None:
    rig = Rig()
    for seconds in order[:-1]:
        rig.lose(Overloaded("full", retry_after_s=seconds))
    with pytest.raises(Overloaded) as caught:
        rig.lose(Overloaded("full, too", retry_after_s=order[-1]), alone=True)
    assert (caught.value.retry_after_s, caught.value.message) == (3.0, "full, too")


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("it drains")])
def test_moving_on_from_a_worker_that_did_nothing_costs_no_budget(error: RequestError) -> None:
    rig = Rig(budget_floor=0, budget_share=0.0, num_live=1)
    for _ in range(7):
        rig.lose(error)
    rig.die(1)  # there is enough for one
    with pytest.raises(Unavailable, match="replay budget"):
        rig.lose(HandoffLost("every rung failed"))


def test_a_full_worker_that_passes_a_new_request_on_is_no_recovery_and_any_other_loss_is() -> None:
    rig = Rig()
    rig.lose(Overloaded("full"))
    assert rig.count(REPLAYS) == 0
    rig.lose(Unavailable("it drains"))
    assert rig.count(REPLAYS) == 1
    rig.deliver()
    rig.lose(Overloaded("full"))
    assert rig.count(REPLAYS) == 2


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("it drains"), HandoffLost("every rung failed")])
def test_a_stream_that_has_begun_pays_for_its_replay_whatever_it_was_lost_to(error: RequestError) -> None:
    rig = Rig(budget_floor=0, budget_share=0.0, num_live=1)
    rig.deliver()
    rig.lose(error)
    with pytest.raises(Unavailable, match=r"budget of 0 \+ 1 live requests a minute"):
        rig.lose(error)
    assert rig.count("jdisagg_replays_refused_total") == 1


def test_the_budget_of_replays_comes_back_with_time_and_with_new_requests() -> None:
    rig = Rig(budget_floor=2, budget_share=1.0, num_live=0)
    for _ in range(2):
        rig.lose(HandoffLost("every rung failed"), now_s=100.0)
    with pytest.raises(Unavailable):
        rig.lose(HandoffLost("every rung failed"), now_s=100.0)
    rig.replays.admit(request("r2"), 100.0)
    rig.lose(HandoffLost("every rung failed"), now_s=100.0)
    rig.lose(HandoffLost("every rung failed"), now_s=130.0)


def test_a_request_that_a_dead_worker_had_accepted_is_not_sent_away_by_full_ones() -> None:
    rig = Rig()
    rig.die(1)
    assert rig.lose(Overloaded("full"), alone=True) > 0.0
    with pytest.raises(Overloaded):
        Rig().lose(Overloaded("full"), alone=True)


def test_prefill_workers_that_go_down_in_two_attempts_are_two_deaths() -> None:
    rig = Rig()
    assert rig.lose(Deadly("p1 to p4 are gone", num_down=4), alone=True) == 0.0
    assert rig.replays.num_quarantined(0.0) == 0
    for _ in range(3):
        rig.lose(HandoffLost("every rung failed"))
    with pytest.raises(Quarantined, match=r"in flight when 8 workers went down \(last: p5 to p8 are gone\)"):
        rig.lose(Deadly("p5 to p8 are gone", num_down=4))
    assert rig.replays.num_quarantined(0.0) == 2, "its id and its prompt"
    other = Rig()
    other.die(1)
    with pytest.raises(Quarantined, match="in flight when 5 workers went down"):
        other.lose(Deadly("p1 to p4 are gone", num_down=4))


def test_the_only_prefill_worker_going_down_in_two_attempts_is_two_deaths() -> None:
    rig = Rig()
    rig.lose(Deadly("p1 is gone", num_down=1), alone=True)
    with pytest.raises(Quarantined, match="in flight when 2 workers went down"):
        rig.lose(Deadly("p1 is gone again", num_down=1), alone=True)


def test_four_silences_are_two_deaths() -> None:
    rig = Rig()
    for number in range(3):
        rig.die(number, SILENT)
    assert rig.replays.num_quarantined(0.0) == 0
    with pytest.raises(HandoffLost, match="in flight when 4 workers went down"):
        rig.die(3, SILENT)
    assert rig.replays.num_quarantined(0.0) == 2, "its id and its prompt"


def test_one_worker_that_falls_silent_again_and_again_is_one_silence() -> None:
    rig = Rig()
    for _ in range(6):
        rig.die(0, SILENT)
    rig.flight.setbacks.is_back(("d0", "epoch"))
    rig.die(1)
    assert rig.replays.num_quarantined(0.0) == 0


def test_a_quarantined_request_is_refused_before_it_is_counted_as_new() -> None:
    rig = Rig(max_deaths=1, quarantine_s=10.0, budget_floor=1, budget_share=1.0, num_live=0)
    with pytest.raises(HandoffLost):
        rig.die(1)
    assert rig.count("jdisagg_requests_quarantined_total") == 1
    other = Flight(request("r2", prompt=(9,)))
    lost = Lost(HandoffLost("every rung failed"), death=False)

    def replay() -> None:
        rig.replays.next_attempt(other, lost, worker="d", alone=False, num_live=0, now_s=0.0)

    replay()
    with pytest.raises(HandoffLost, match="quarantined for 10 s more"):
        rig.replays.admit(rig.flight.request, 0.0)
    with pytest.raises(Unavailable, match="replay budget"):
        replay()
    assert rig.replays.num_quarantined(10.0) == 0
    rig.replays.admit(rig.flight.request, 10.0)
    replay()


def test_a_new_request_waits_for_a_worker_a_little_and_a_replay_longer() -> None:
    rig = Rig(place_wait_s=5.0)
    rig.replays.wait(rig.flight, "nobody is there", 0.0, 4.9, weights=None, late=False)
    with pytest.raises(Unavailable, match=r"request r1: nobody is there; waited 5 s: start one, or"):
        rig.replays.wait(rig.flight, "nobody is there", 0.0, 5.0, weights=None, late=False)
    rig.die(1)
    rig.replays.wait(rig.flight, "nobody is there", 0.0, 29.9, weights="w", late=False)
    with pytest.raises(Unavailable, match=r"waited 30 s: start one of fingerprint w, or"):
        rig.replays.wait(rig.flight, "nobody is there", 0.0, 30.0, weights="w", late=False)
    with pytest.raises(DeadlineExceeded):
        rig.replays.wait(rig.flight, "", 0.0, 0.0, weights=None, late=True)


def test_a_request_that_came_with_attempts_behind_it_is_a_new_one_until_it_is_lost_here() -> None:
    rig = Rig(place_wait_s=5.0)
    rig.flight = Flight(request("r1", attempt=3))
    with pytest.raises(Unavailable, match="waited 5 s"):
        rig.replays.wait(rig.flight, "nobody is there", 0.0, 5.0, weights=None, late=False)


def test_a_request_that_is_lost_for_good_before_its_first_token_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(max_refusals=0)
    with pytest.raises(Unavailable):
        rig.lose(Unavailable("not now"))
    assert "request r1: not replayed; stage before its first token, worker d: not now" in caplog.text


def test_a_client_waited_from_the_first_loss_on_until_it_hears_again_and_is_told_once() -> None:
    setbacks = Setbacks()
    assert setbacks.overcome(9.0) is None

    def lose(now_s: float) -> None:
        setbacks.add(Lost.told(Unavailable("not now")), "w", now_s, is_full=False, alone=False)

    lose(10.0)
    lose(12.0)
    assert setbacks.overcome(15.0) == 5.0
    assert setbacks.overcome(16.0) is None
    lose(20.0)
    assert setbacks.overcome(21.0) == 1.0


def test_a_new_request_that_full_workers_pass_on_is_not_logged_and_a_stream_that_one_gives_back_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the rate of an overload it would be a flood, in which what was lost is not seen."""
    caplog.set_level(logging.INFO)
    entry = Entry(member(MEMBER, worker="d2"), 0.0)
    rig = Rig()
    rig.lose(Overloaded("full"), now_s=1.0)
    rig.flight.entry = entry
    rig.replays.heard(rig.flight, FIRST, 2.0)
    assert caplog.messages == []
    rig.deliver()
    rig.lose(Overloaded("full"), now_s=3.0)
    rig.replays.heard(rig.flight, FIRST, 4.0)
    assert caplog.messages == [
        "request r1: recovering by replay; stage behind 1 tokens, worker d: full; attempt 2",
        "request r1: goes on 1.00 s after it was lost; attempt 2, worker d2",
    ]


def test_a_request_that_a_dead_worker_lost_is_said_to_go_on_also_where_full_ones_passed_it_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig()
    rig.die(1)
    rig.lose(Overloaded("full"), now_s=1.0)
    rig.flight.entry = Entry(member(MEMBER, worker="d2"), 0.0)
    rig.replays.heard(rig.flight, FIRST, 4.0)
    assert caplog.messages[1:] == ["request r1: goes on 4.00 s after it was lost; attempt 2, worker d2"]


@pytest.mark.parametrize(("lacks", "late"), [("nobody is there", False), ("", True)])
def test_of_requests_that_wait_in_vain_the_first_few_are_logged_and_the_others_counted(
    lacks: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig()

    def fail(now_s: float) -> None:
        with pytest.raises(DeadlineExceeded if late else Unavailable):
            rig.replays.wait(rig.flight, lacks, now_s - 5.0, now_s, weights=None, late=late)

    for _ in range(FAILED_FIRST + 30):
        fail(100.0)
    assert len(caplog.messages) == FAILED_FIRST
    fail(100.0 + FAILED_EVERY_S)
    assert caplog.messages[-1].endswith("; 30 more since it was last said")
