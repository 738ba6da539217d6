"""Alert rules and the dashboard ask for metrics, labels and label values that processes really show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from jdisagg.core import errors
from jdisagg.core.config import ServerConfig
from jdisagg.core.fleet import State
from jdisagg.core.metrics import DAMAGE, PORTS, Counts, Metrics
from jdisagg.core.requests import FinishReason, Role
from jdisagg.handoff.messages import ChunkReady
from jdisagg.serve.backends import _ORDER
from jdisagg.transfer.target import PieceError, PieceTarget

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs/prometheus/jdisagg.yml"
TRIED = ROOT / "configs/prometheus/jdisagg_test.yml"
BOARD = ROOT / "configs/grafana/jdisagg.json"
MANUAL = ROOT / "docs/operations.md"
OF_THE_LIBRARY = frozenset(
    """
    process_open_fds process_max_fds process_start_time_seconds process_cpu_seconds_total process_resident_memory_bytes
    """.split()
)
SCRAPED = frozenset(("job", "instance"))
OF_PROMETHEUS = {"up": SCRAPED}

_SELECTED = re.compile(r"\b((?:\w+:)?(?:jdisagg|process)_\w+(?::\w+)?|up\b)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)=~?"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")


def rules() -> Iterator[dict[str, str]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def asked() -> Iterator[tuple[str, str]]:
    """What asks, and its expression."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def series(*, engine: bool) -> dict[str, frozenset[str]]:
    """What a process shows, by name, with its labels."""
    metrics = Metrics(engine=engine)
    shown = {family.name for family in metrics.registry.collect()}
    found = dict.fromkeys(OF_THE_LIBRARY, frozenset[str]())
    for group in vars(metrics).values():
        for one in vars(group).values() if not isinstance(group, MetricWrapperBase) else (group,):
            if isinstance(one, MetricWrapperBase | Counts) and one._name in shown:
                labels = frozenset(one._labelnames)
                found |= {one._name: labels, f"{one._name}_total": labels}
                found |= {f"{one._name}_sum": labels, f"{one._name}_count": labels, f"{one._name}_bucket": labels | {"le"}}
    return found


@pytest.fixture(scope="module")
def recorded() -> dict[str, frozenset[str]]:
    """What the rules record, with its labels: those before the name's first colon."""
    return {name: frozenset(name.split(":")[0].split("_")) for rule in rules() if (name := rule.get("record", ""))}


@pytest.mark.parametrize(("who", "expression"), list(asked()))
def test_metrics_and_labels_exist_where_they_are_asked_for(
    who: str, expression: str, recorded: dict[str, frozenset[str]]
) -> None:
    of_routers = re.search('role=~?"router"', expression) and "jdisagg_routers" not in expression  # which workers show
    known = recorded | series(engine=not of_routers) | OF_PROMETHEUS
    labels = set(SCRAPED)
    for name, matchers in _SELECTED.findall(expression):
        assert name in known, who
        labels |= known[name]
        assert {label for label, _ in _MATCHER.findall(matchers)} <= known[name], who
    assert {label for group in _GROUPED.findall(expression) for label in group.split(", ") if label} <= labels, who


def test_values_that_are_asked_for_exist() -> None:
    ends = {kind.reason for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.JdisaggError)}
    known = {
        "role": {role.value for role in Role} | {"router", "colocated"},
        "reason": ends | {reason.value for reason in FinishReason} | set(DAMAGE) | {"publish"},
        "state": {state.value for state in State}  # of workers ..
        | {"usable", "down"}  # .. of a decode worker's peers ..
        | {"registered", "not_registered"},  # .. and of a worker's routers
        "port": set(PORTS),
        "rung": {"refetch", "other_backend", "reconnect", "other_prefill", "local_prefill", "replay"},
    }
    for who, expression in asked():
        for label, values in _MATCHER.findall(expression):
            if label not in SCRAPED and values not in (".*", "$model"):
                assert set(values.split("|")) <= known[label], who


@pytest.mark.parametrize("engine", [False, True])
def test_how_requests_can_end_is_shown_from_the_start_as_no_rate_sees_the_first_of_a_series(engine: bool) -> None:
    ends = {kind.reason for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.JdisaggError)}
    ends |= {reason.value for reason in FinishReason} | ({"refused"} if engine else set())
    shown = re.findall(r'jdisagg_requests_finished_total{reason="(\w+)"} 0.0', Metrics(engine=engine).text())
    assert sorted(shown) == sorted(ends)


@pytest.mark.parametrize("engine", [False, True])
def test_every_process_shows_the_connections_it_refuses_from_the_start(engine: bool) -> None:
    shown = re.findall(r'jdisagg_connections_refused_total{port="(\w+)"} 0.0', Metrics(engine=engine).text())
    assert sorted(shown) == sorted(PORTS)
    assert shown


def raised_for_damage() -> set[str]:
    """The reasons for which bytes that came are refused."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = PieceTarget(sharding=sharding, dtype="float32", chunk_tokens=1, num_layers=1, num_kv_heads=1, features=2)
    ready = ChunkReady(key="k", begin=0, end=1, shape=(1, 1, 1, 2), dtype="float32", num_bytes=8, checksum=1)
    reasons = set[str]()
    for data in (bytes(8), bytes(7)):
        with pytest.raises(PieceError) as refused:
            target.unpack(data, ready)
        reasons.add(refused.value.reason)
    return reasons


def test_damage_is_shown_from_the_start_under_the_reasons_by_which_it_is_counted() -> None:
    """Of every backend that carries bytes: one damaged piece in a year is to raise the alert."""
    text = Metrics().text()
    for backend in {name for order in _ORDER.values() for name in order}:
        for reason in raised_for_damage():
            assert f'jdisagg_transfer_failures_total{{backend="{backend}",reason="{reason}"}} 0.0' in text
    (expression,) = (expr for who, expr in asked() if who == "JdisaggKVDamaged")
    assert set(dict(_MATCHER.findall(expression))["reason"].split("|")) == raised_for_damage()


def test_a_share_of_failures_is_one_of_all_as_what_never_succeeds_has_no_count_of_successes() -> None:
    """jdisagg_transfer_seconds has a series only once a piece has arrived; one that is absent makes no ratio, and no alert."""
    (expression,) = (expr for who, expr in asked() if who == "JdisaggTransfersFail")
    failures, _, of_all = expression.partition("/")
    (failed,) = re.findall(r'rate\(jdisagg_transfer_failures_total{reason!="publish"}\[10m\]\)', failures)
    assert f"{failed} or rate(jdisagg_transfer_seconds_count[10m])" in of_all


def test_every_alert_is_tried_by_series_that_processes_show() -> None:
    """promtool evaluates them, where it is installed (`scripts/checks.py`)."""
    tried = yaml.safe_load(TRIED.read_text())["tests"]
    raised = {sample["labels"] for test in tried for one in test["promql_expr_test"] for sample in one["exp_samples"]}
    assert {name for labels in raised for name in re.findall(r'alertname="(\w+)"', labels)} == {
        rule["alert"] for rule in rules() if "alert" in rule
    }
    known = series(engine=True) | series(engine=False) | OF_PROMETHEUS
    for test in tried:
        for one in test["input_series"]:
            ((name, matchers),) = _SELECTED.findall(one["series"])
            assert {label for label, _ in _MATCHER.findall(matchers)} <= known[name] | SCRAPED, one["series"]


def test_alerts_say_how_bad_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in yaml.safe_load(RULES.read_text())["groups"][1:] for rule in rule["rules"]]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) > 15
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]
        assert alert["annotations"]["description"].endswith("."), alert["alert"]


def test_some_alert_stays_when_a_process_ends_and_its_series_with_it() -> None:
    """One on a value that the process showed ends then, as if all were well."""
    by_name = {rule["alert"]: rule["expr"] for rule in rules() if "alert" in rule}
    assert by_name["JdisaggNoRouter"].startswith("absent(jdisagg_build_info{")
    assert by_name["JdisaggProcessDown"].startswith("up{")
    assert "last_over_time(jdisagg_build_info[30m])" in by_name["JdisaggRestartsOften"]  # it is down between two starts


@pytest.mark.parametrize("alert", ["JdisaggRouterNotReady", "JdisaggWorkerNotReady"])
def test_a_process_that_drains_raises_no_alert_unless_that_takes_longer_than_is_usual_and_the_rule_says_so(alert: str) -> None:
    _, _, rule = RULES.read_text().partition(f"alert: {alert}\n")
    ((minutes, remark),) = re.findall(r"for: (\d+)m(.*)", rule.partition("- alert:")[0])
    assert ServerConfig().drain_s < 60 * int(minutes)
    assert remark.startswith("  # SET: longer than --drain-s")


def test_the_rule_of_the_manual_for_a_number_of_workers_is_tried_with_no_router_left() -> None:
    (rule,) = re.findall(r"`({alert:\s[^`]*})`", MANUAL.read_text())
    expression = yaml.safe_load(rule)["expr"]
    tried = [one for test in yaml.safe_load(TRIED.read_text())["tests"] for one in test["promql_expr_test"]]
    results = [one["exp_samples"] for one in tried if one["expr"] == expression]
    assert results == [[], [{"labels": "{}", "value": 0}]]
    ((name, matchers),) = _SELECTED.findall(expression)
    assert {label for label, _ in _MATCHER.findall(matchers)} <= series(engine=False)[name]
