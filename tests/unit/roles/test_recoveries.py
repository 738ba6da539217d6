"""What a decode worker's metrics and log tell when something failed and a request goes on all the same, or does not."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, RequestError, Unavailable
from jdisagg.core.fleet import DRAINING
from jdisagg.core.metrics import Metrics
from jdisagg.handoff import actions as act
from jdisagg.roles.recoveries import FAILED_FIRST, Recoveries
from tests.unit.roles.measured import read


class Peers:
    """Prefill workers: why each is not asked ("" = it is), and those of whom no KV came."""

    def __init__(self, **failures: str) -> None:
        self.reasons = failures
        self.without_kv: list[tuple[str, str]] = []
        self.given_up: list[tuple[str, str, str]] = []

    def failures(self) -> dict[str, str]:
        return self.reasons

    def unreached(self, peer: str, backend: str, why: str) -> None:
        self.given_up.append((peer, backend, why))

    def no_kv(self, peer: str, cause: str) -> None:
        self.without_kv.append((peer, cause))

    def kv_came(self, peer: str) -> None:
        self.without_kv = [(other, cause) for other, cause in self.without_kv if other != peer]


def recoveries(**failures: str) -> tuple[Recoveries, Metrics, Peers]:
    metrics, peers = Metrics(), Peers(**failures)
    return Recoveries(metrics, cast(Any, peers)), metrics, peers


def recovered(rung: str = "refetch", peer: str = "p:1", cause: str = "its stream ended", **more: Any) -> act.Recovered:
    return act.Recovered(rung, "r", peer, "transferring", cause, **more)


def test_a_rung_is_counted_and_told_with_its_request_peer_stage_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    told, metrics, peers = recoveries()
    told.recovered(recovered("other_prefill"), 0.0)
    told.recovered(recovered("refetch", cause="p:1 has closed"), 0.0)
    assert read(metrics, "recoveries_total", rung="other_prefill") == read(metrics, "recoveries_total", rung="refetch") == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages == [
        "request r: recovering by other_prefill; stage transferring, prefill peer p:1: its stream ended",
        "request r: recovering by refetch; stage transferring: p:1 has closed",
    ]
    assert not peers.without_kv


def test_that_a_peer_takes_less_than_this_worker_is_told_once_a_minute_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told, metrics, _ = recoveries()
    with caplog.at_level("INFO", "jdisagg.roles.recoveries"):
        for now_s in (5.0, 6.0, 64.0, 66.0):
            told.recovered(recovered("local_prefill", cause="refused: its context is short", refused=True), now_s)
    line = "prefill peer p:1 does not take what this worker takes, look at its flags: refused: its context is short"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [line, f"{line}; 2 more since it was last said"]
    rung = "request r: recovering by local_prefill; stage transferring, prefill peer p:1: refused: its context is short"
    assert [record.getMessage() for record in caplog.records if record.levelname == "INFO"] == [rung] * 4
    assert read(metrics, "recoveries_total", rung="local_prefill") == 4


def test_a_peer_whose_kv_does_not_come_is_remembered_with_the_cause() -> None:
    told, _, peers = recoveries()
    told.no_kv(act.NoKV("p:1", "stalled"))
    assert peers.without_kv == [("p:1", "stalled")]
    assert not peers.given_up


def test_that_no_kv_comes_from_a_peer_is_remembered_until_some_does() -> None:
    told, _, peers = recoveries()
    told.no_kv(act.NoKV("p:1", "stalled"))
    told.no_kv(act.NoKV("p:2", "slow"))
    assert peers.without_kv == [("p:1", "stalled"), ("p:2", "slow")]
    told.complete("")
    told.complete("p:1")
    assert peers.without_kv == [("p:2", "slow")]
    peers.without_kv.append(("p:1", "nobody says so again"))
    told.complete("p:1")
    assert len(peers.without_kv) == 2, "each piece of news is told once"


def test_that_no_kv_came_from_a_peer_is_forgotten_with_the_peer() -> None:
    told, _, peers = recoveries(p="it is gone", q="")
    for peer in ("p", "q"):
        told.no_kv(act.NoKV(peer, "stalled"))
    del peers.reasons["p"]
    told.tick()
    peers.reasons["p"] = ""
    told.tick()
    told.complete("p")
    told.complete("q")
    assert peers.without_kv == [("p", "stalled")], "of the new one at that address there is nothing to take back"


def test_a_backend_over_which_nothing_is_reached_is_remembered_with_the_cause() -> None:
    told, _, peers = recoveries()
    told.recovered(recovered("other_backend", unreached="jax", cause="nobody listens"), 0.0)
    assert peers.given_up == [("p:1", "jax", "nobody listens")]
    assert not peers.without_kv


@pytest.mark.parametrize(
    ("failures", "known"),
    [({}, ""), ({"a": "it is gone", "b": "", "c": "a lease ran out", "d": "it is gone"}, " (a lease ran out; it is gone)")],
)
def test_that_nobody_computes_prompts_is_told_once_until_one_serves(
    failures: dict[str, str], known: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told, metrics, _ = recoveries(**failures)
    told.served()
    assert not caplog.messages
    for _ in range(2):
        for _ in range(3):
            told.recovered(recovered("local_prefill", peer="", cause="no prefill worker answers"), 0.0)
        told.served()
        told.served()
    line = f"request r: no prefill worker answers{known}; prompts are computed here until one does"
    assert caplog.messages == [line, "a prefill worker serves again; 3 prompts were computed here meanwhile"] * 2
    assert read(metrics, "recoveries_total", rung="local_prefill") == 6


def test_peers_are_counted_by_what_is_known_of_them() -> None:
    told, metrics, peers = recoveries(a="", b="", c=DRAINING, d="it is gone", e="a lease ran out", f="its model differs")
    told.tick()
    assert [read(metrics, "peers", state=state) for state in ("usable", "draining", "down")] == [2, 1, 3]
    peers.reasons = {}
    told.tick()
    assert [read(metrics, "peers", state=state) for state in ("usable", "draining", "down")] == [0, 0, 0]


@pytest.mark.parametrize(("outcome", "goes_on"), [("moved", "b:1"), ("returned", "a:1"), ("abandoned", "a:1")])
def test_a_hedge_is_counted_and_told_with_who_goes_on(outcome: str, goes_on: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told, metrics, _ = recoveries()
    told.hedged(act.Hedged(outcome, "r", "a:1", "b:1"))
    assert read(metrics, "prefill_hedges_total", outcome=outcome) == 1
    assert caplog.messages == [f"request r: prefill peer a:1 was quiet, b:1 was asked: {outcome}, goes on at {goes_on}"]


@pytest.mark.parametrize("error", [HandoffLost("request r: every peer died"), Unavailable("request r: every peer died")])
def test_requests_that_no_rung_is_left_for_are_told_of_and_then_counted(
    error: RequestError, caplog: pytest.LogCaptureFixture
) -> None:
    told, _, _ = recoveries()
    for _ in range(FAILED_FIRST + 5):
        told.failed("r", error, now_s=100.0)
    assert caplog.messages == ["request r: failed: every peer died"] * FAILED_FIRST


def test_of_a_deadline_its_client_is_told_alone(caplog: pytest.LogCaptureFixture) -> None:
    recoveries()[0].failed("r", DeadlineExceeded("request r: its deadline passed"), now_s=100.0)
    assert not caplog.messages
