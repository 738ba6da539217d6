"""The text of /metrics is what Prometheus and its linter expect."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jdisagg.core.config import DeviceConfig, ServerConfig
from jdisagg.core.metrics import CONTENT_TYPE, Metrics

WANTED = """
requests kv_pages_free kv_pages_used published_bytes leases time_to_first_token_seconds inter_token_latency_seconds
request_queue_seconds request_prefill_seconds request_transfer_seconds request_decode_seconds prefill_tokens_total
transfer_bytes_total transfer_seconds transfer_failures_total recoveries_total prefix_cache_hit_tokens_total
preemptions_total retractions_total compiles_after_ready_total step_seconds host_overhead_seconds build_info
request_seconds tick_seconds_total
""".split()


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    made.set_build(role="decode", model="demo", version="1.2", platform="gpu", device_kind="NVIDIA H200")
    return made


@pytest.mark.parametrize("name", WANTED)
def test_every_documented_metric_is_exposed_with_help_and_type(metrics: Metrics, name: str) -> None:
    assert f"# HELP jdisagg_{name} " in metrics.text()
    assert f"# TYPE jdisagg_{name} " in metrics.text()


def test_observations_show_in_the_text(metrics: Metrics) -> None:
    metrics.requests.ttft_seconds.observe(0.2)
    metrics.fleet.recoveries.labels(rung="replay").inc()
    metrics.requests.live.labels(state="running").set(3)
    text = metrics.text()
    assert 'jdisagg_time_to_first_token_seconds_bucket{le="0.25"} 1.0' in text
    assert 'jdisagg_time_to_first_token_seconds_bucket{le="0.1"} 0.0' in text
    assert 'jdisagg_recoveries_total{rung="replay"} 1.0' in text
    assert 'jdisagg_requests{state="running"} 3.0' in text


@pytest.mark.parametrize(
    ("name", "longest_s"),
    [
        ("time_to_first_token_seconds", ServerConfig().default_deadline_s),
        ("request_seconds", ServerConfig().default_deadline_s),
        ("step_seconds", DeviceConfig().step_timeout_s),
        ("inter_token_latency_seconds", DeviceConfig().step_timeout_s),
        ("transfer_seconds", DeviceConfig().step_timeout_s),
    ],
)
def test_what_may_take_long_with_a_large_model_has_a_bucket(name: str, longest_s: float) -> None:
    metrics = Metrics()
    metrics.engine.step_seconds.labels(phase="prefill").observe(1.0)
    metrics.transfer.seconds.labels(backend="tcp").observe(1.0)
    ends = re.findall(rf'jdisagg_{name}_bucket{{.*le="([0-9.]+)"', metrics.text())
    assert max(map(float, ends)) >= longest_s


def test_the_build_names_the_version_of_this_package(metrics: Metrics) -> None:
    labels = r'device_kind="NVIDIA H200",model="demo",platform="gpu",python="[^"]+",role="decode",version="1\.2"'
    assert re.search(rf"^jdisagg_build_info{{{labels}}} 1\.0$", metrics.text(), re.MULTILINE)


def test_every_rung_is_there_before_it_is_taken(metrics: Metrics) -> None:
    for rung in ("refetch", "other_backend", "reconnect", "other_prefill", "local_prefill"):
        assert f'jdisagg_recoveries_total{{rung="{rung}"}} 0.0' in metrics.text()
    router = Metrics(engine=False).text()
    assert 'jdisagg_recoveries_total{rung="replay"} 0.0' in router
    assert "refetch" not in router


@pytest.mark.parametrize("engine", [False, True])
def test_every_process_shows_whether_it_serves_as_of_the_scrape(engine: bool) -> None:
    now = {"serves": False}
    metrics = Metrics(engine=engine)
    metrics.set_ready(lambda: now["serves"])
    assert "jdisagg_ready 0.0" in metrics.text()
    now["serves"] = True
    assert "jdisagg_ready 1.0" in metrics.text()


def test_names_follow_the_conventions_of_the_linter(metrics: Metrics) -> None:
    for family in text_string_to_metric_families(metrics.text()):
        assert re.fullmatch(r"(jdisagg|process)_[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|us|kb|mb|total|count|counter|gauge|histogram)$", family.name), family.name
        if family.type == "counter":
            assert {s.name for s in family.samples} <= {f"{family.name}_total"}, family.samples
        if family.type == "histogram":
            assert family.name.endswith("_seconds"), family.name


def test_every_line_parses_and_there_are_no_created_series(metrics: Metrics) -> None:
    assert len(list(text_string_to_metric_families(metrics.text()))) >= len(WANTED)
    assert "_created" not in metrics.text()
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_two_instances_do_not_share_state() -> None:
    first, second = Metrics(), Metrics()
    first.engine.preemptions.inc()
    assert "jdisagg_preemptions_total 1.0" in first.text()
    assert "jdisagg_preemptions_total 0.0" in second.text()


def test_a_process_without_an_engine_exposes_no_series_of_one() -> None:
    router = Metrics(engine=False)
    router.set_build(role="router", model="demo", version="1.2")
    router.cache.pages_free.set(3)  # goes nowhere
    names = {family.name for family in text_string_to_metric_families(router.text())}
    assert {"jdisagg_time_to_first_token_seconds", "jdisagg_inter_token_latency_seconds", "jdisagg_build_info"} <= names
    assert not [name for name in names if re.search("kv_|queue|prefill|transfer|step|compiles|lease", name)]
