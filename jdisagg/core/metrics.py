"""Every metric of the process, defined here and nowhere else. Prometheus text format, `jdisagg_*`, base units.

A composition root makes one `Metrics` and hands it down; the parts call `metrics.requests.ttft_seconds.observe(0.12)`. Each
instance has a registry of its own, so two engines in one test do not meet. All metric objects are thread-safe.

    requests    their lives: how many, how long in which phase, how they end
    engine      steps, ticks, and what goes wrong in them
    cache       KV pages and the prefix cache
    transfer    KV on its way, seen from both sides
    fleet       workers, and steps taken to survive their failures
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from platform import python_version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from jdisagg.core.errors import RequestError
from jdisagg.core.requests import FinishReason

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_REQUEST_BUCKETS_S = (  # to --default-deadline-s
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_STEP_BUCKETS_S = (  # to --step-timeout-s
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_HOST_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01),
    *(0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
_BUILD_LABELS = ("role", "model", "python", "version", "platform", "device_kind")
_LATE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ENDS = sorted({*(reason.value for reason in FinishReason), *RequestError.reasons()})
LOSSES = ("closed", "broken", "silent", "evicted", "replaced")
_CARRIERS = ("grpc", "tcp", "shm", "jax")  # backends that KV could be damaged on
DAMAGE = ("checksum", "truncated")
_RUNGS = ("refetch", "other_backend", "reconnect", "other_prefill", "local_prefill")
_HEDGE_OUTCOMES = ("moved", "returned", "refused", "abandoned")
_RUNGS_OF_ROUTERS = ("replay",)
PORTS = (HTTP_PORT, GRPC_PORT) = ("http", "grpc")  # whose connections that find no room are counted
CALL_OUTCOMES = CALLED, CUT, TEXT, UNREAD, FORCED = ("called", "cut", "text", "unread", "forced")
GRAMMAR_OUTCOMES = COMPILED, REFUSED, ENDLESS = ("compiled", "refused", "endless")
# fed by a process without an engine, too; the others would be 0 there for ever
_WITHOUT_ENGINE = frozenset(
    """
    ready workers workers_draining workers_unlike workers_lost worker_states build_info time_to_first_token_seconds
    inter_token_latency_seconds request_decode_seconds generated_tokens requests_finished recoveries replays_refused
    requests_quarantined request_seconds requests prompt_tokens grammars tool_answers event_loop_late_seconds
    connections_refused
    """.split()
)


class Counts:
    """A gauge that is counted at every scrape, all of its series at once."""

    def __init__(self, name: str, help_text: str, labelnames: tuple[str, ...]) -> None:
        self._name, self._help_text, self._labelnames = name, help_text, labelnames
        self._count: Callable[[], Mapping[tuple[str, ...], int]] = dict

    def set_function(self, count: Callable[[], Mapping[tuple[str, ...], int]]) -> None:
        """`count` gives the number for each of the labels' values; call once, at start."""
        self._count = count

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """As prometheus_client asks for it."""
        family = GaugeMetricFamily(self._name, self._help_text, labels=self._labelnames)
        for values, number in self._count().items():
            family.add_metric(values, number)
        yield family


class _Registry:
    """Names and registers what is defined below. `engine` False: only what a router feeds is exposed."""

    def __init__(self, *, engine: bool) -> None:
        disable_created_metrics()  # a switch of the library, not of a registry: it would double the number of series
        self.exposed = CollectorRegistry(auto_describe=True)
        self.engine = engine

    def gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        """`jdisagg_NAME`."""
        return Gauge(f"jdisagg_{name}", help_text, labels, registry=self._of(name))

    def counts(self, name: str, help_text: str, *labels: str) -> Counts:
        """`jdisagg_NAME`."""
        made = Counts(f"jdisagg_{name}", help_text, labels)
        if (registry := self._of(name)) is not None:
            registry.register(made)
        return made

    def counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """`jdisagg_NAME_total`."""
        return Counter(f"jdisagg_{name}_total", help_text, labels, registry=self._of(name))

    def histogram(self, name: str, help_text: str, buckets_s: tuple[float, ...], *labels: str) -> Histogram:
        """`jdisagg_NAME`, with these upper bounds."""
        return Histogram(f"jdisagg_{name}", help_text, labels, registry=self._of(name), buckets=buckets_s)

    def _of(self, name: str) -> CollectorRegistry | None:
        return self.exposed if self.engine or name in _WITHOUT_ENGINE else None


class RequestMetrics:
    """How many, how long in which phase, how they end."""

    def __init__(self, new: _Registry) -> None:
        buckets_s = _REQUEST_BUCKETS_S
        self.live = new.gauge("requests", "Live requests by state; a router's: running (a worker has it), waiting.", "state")
        self.finished = new.counter("requests_finished", "Requests that ended, by finish reason or error.", "reason")
        for reason in (*_ENDS, "refused") if new.engine else _ENDS:  # a rate sees no first one of a series that begins with it
            self.finished.labels(reason=reason)
        self.ttft_seconds = new.histogram(
            "time_to_first_token_seconds", "A request's coming to its first token sent.", buckets_s
        )
        self.itl_seconds = new.histogram(
            "inter_token_latency_seconds", "Gap between tokens of one stream; 0 of those sent at once.", _STEP_BUCKETS_S
        )
        self.queue_seconds = new.histogram(
            "request_queue_seconds", "Time in which nobody worked on a request, here or on a peer.", buckets_s
        )
        self.prefill_seconds = new.histogram(
            "request_prefill_seconds", "Work on the prompt to first token; again after a preemption.", buckets_s
        )
        self.transfer_seconds = new.histogram(
            "request_transfer_seconds", "First token known to KV complete: what the transfer adds.", buckets_s
        )
        self.decode_seconds = new.histogram(
            "request_decode_seconds", "First token, with its KV in place, to last token.", buckets_s
        )
        self.seconds = new.histogram("request_seconds", "A request from coming to end: the sum of its phases.", buckets_s)
        self.prompt_tokens = new.counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.grammars = new.counter("grammars", "Grammars of clients that were not known, by what became of them.", "outcome")
        for outcome in GRAMMAR_OUTCOMES:
            self.grammars.labels(outcome=outcome)
        self.tool_answers = new.counter("tool_answers", "Answers to chats that offered tools, by what they are.", "outcome")
        for outcome in CALL_OUTCOMES:
            self.tool_answers.labels(outcome=outcome)
        self.generated_tokens = new.counter("generated_tokens", "Tokens sampled and delivered.")


class EngineMetrics:
    """Steps, ticks, and what goes wrong in them."""

    def __init__(self, new: _Registry) -> None:
        self.step_seconds = new.histogram(
            "step_seconds", "Dispatch of a step, or the tokens of the one before, to its tokens.", _STEP_BUCKETS_S, "phase"
        )
        self.host_overhead_seconds = new.histogram(
            "host_overhead_seconds", "Host time of one tick that dispatched a step, without waiting.", _HOST_BUCKETS_S
        )
        self.tick_seconds = new.counter("tick_seconds", "Time of an engine's thread by stage of its tick.", "stage")
        self.prefill_tokens = new.counter("prefill_tokens", "Prompt tokens computed, by the role that did it.", "role")
        self.dispatched_decode_steps = new.counter("dispatched_decode_steps", "Decode steps; several may be one dispatch.")
        self.preemptions = new.counter(
            "preemptions", "Times a running request, or a computed prompt that waited, gave up its pages."
        )
        self.retractions = new.counter("retractions", "Decode requests retracted and resumed later.")
        self.nan_requests = new.counter("nan_requests", "Requests that failed here, as their logits held NaN or infinity.")
        self.compiles_after_ready = new.counter("compiles_after_ready", "XLA compilations after READY; stays 0.")


class CacheMetrics:
    """KV pages and the prefix cache."""

    def __init__(self, new: _Registry) -> None:
        self.pages_free = new.gauge("kv_pages_free", "KV pages nobody references (reusable prefix pages included).")
        self.pages_used = new.gauge("kv_pages_used", "KV pages referenced by at least one request.")
        usage = new.gauge("kv_usage_ratio", "The part of all KV pages that is referenced, 0 to 1.")
        usage.set_function(lambda: _part(self.pages_used, self.pages_free))
        self.query_tokens = new.counter("prefix_cache_query_tokens", "Prompt tokens looked up in the cache.")
        self.hit_tokens = new.counter("prefix_cache_hit_tokens", "Prompt tokens served from the prefix cache.")
        self.refound_tokens = new.counter(
            "prefix_cache_refound_tokens", "Tokens of preempted requests found when they came back."
        )
        self.forks = new.counter("forks", "Choices that took the KV of a sibling's prompt.")
        self.host_tokens = new.counter("host_kv_tokens", "KV moved to host memory (out) and back (in).", "direction")
        self.host_held = new.gauge("host_kv_held_tokens", "Tokens whose KV is in host memory now.")
        self.events = new.counter("kv_events", "Published changes of the prefix cache: stored, removed, cleared.", "kind")
        self.event_listeners = new.gauge("kv_event_listeners", "Streams of KVEventsService that are open.")


class TransferMetrics:
    """KV on its way, seen from both sides."""

    def __init__(self, new: _Registry) -> None:
        self.seconds = new.histogram("transfer_seconds", "Time to fetch one KV piece.", _STEP_BUCKETS_S, "backend")
        self.bytes = new.counter("transfer_bytes", "KV bytes received and verified, by backend.", "backend")
        self.failures = new.counter("transfer_failures", "KV pieces that did not arrive.", "backend", "reason")
        for backend, reason in product(_CARRIERS, DAMAGE):  # an alert on an increase must see the first
            self.failures.labels(backend=backend, reason=reason)
        self.hidden_seconds = new.counter(
            "transfer_hidden_seconds", "The part of transfer_seconds that passed while the prompt was still computed."
        )
        self.published_bytes = new.gauge("published_bytes", "Bytes of KV pieces held for fetching peers.")
        self.leases = new.gauge("leases", "Live hand-offs that a prefill worker serves, and loans of a decode worker.")
        self.borrowed_tokens = new.counter("borrowed_tokens", "Tokens that were fetched from the receiver instead of computed.")
        self.borrowings = new.counter("borrowings", "KV asked back from a receiver, by how it ended.", "outcome")


class FleetMetrics:
    """Workers, and steps taken to survive their failures."""

    def __init__(self, new: _Registry) -> None:
        self.workers = new.gauge("workers", "Workers this router knows (decode and unified: connected ones).", "role")
        self.draining = new.gauge("workers_draining", "Those of them that are about to end, and take no new requests.", "role")
        self.states = new.counts(
            "worker_states", "Workers that have registered, by what this router makes of them.", "role", "state"
        )
        self.unlike = new.counts(
            "workers_unlike",
            "Registered workers, not draining, whose bits in exact are not those of most of their weights.",
            "role",
        )
        self.lost = new.counter(
            "workers_lost", "Workers that were connected, or prefill, and went without saying so.", "reason"
        )
        for reason in LOSSES:
            self.lost.labels(reason=reason)
        self.peers = new.gauge("peers", "Prefill workers that a decode worker has spoken to.", "state")
        self.routers = new.gauge("routers", "Routers that a worker is to register with, by whether they have it.", "state")
        self.recoveries = new.counter("recoveries", "Steps taken to survive failures, by rung.", "rung")
        for rung in _RUNGS if new.engine else _RUNGS_OF_ROUTERS:  # likewise
            self.recoveries.labels(rung=rung)
        self.hedges = new.counter("prefill_hedges", "Prompts for which a second P was asked, by outcome.", "outcome")
        for outcome in _HEDGE_OUTCOMES:
            self.hedges.labels(outcome=outcome)
        self.replays_refused = new.counter("replays_refused", "Requests that failed as the replay budget was spent.")
        self.quarantined = new.counter(
            "requests_quarantined", "Requests that failed, and are refused for a while: in flight at several deaths."
        )


class Metrics:
    """All metrics of one process."""

    def __init__(self, *, engine: bool = True) -> None:
        """`engine` False: expose only what a router feeds; a 0 that nobody measured would read as "no page is free"."""
        new = _Registry(engine=engine)
        self.registry = new.exposed
        ProcessCollector(registry=self.registry)
        self._ready = new.gauge("ready", "1 while a request would be served now, as /ready says, else 0.")
        self.requests = RequestMetrics(new)
        self.engine = EngineMetrics(new)
        self.cache = CacheMetrics(new)
        self.transfer = TransferMetrics(new)
        self.fleet = FleetMetrics(new)
        self.event_loop_late_seconds = new.histogram(
            "event_loop_late_seconds",
            "How late the event loop does what is due, looked at ten times a second.",
            _LATE_BUCKETS_S,
        )
        self.connections_refused = new.counter(
            "connections_refused", "Connections that found those of their port all taken.", "port"
        )
        for port in PORTS:
            self.connections_refused.labels(port=port)
        self._build_info = new.gauge("build_info", "Constant 1; the labels name the build.", *_BUILD_LABELS)

    def set_build(self, *, role: str, model: str, version: str, platform: str = "", device_kind: str = "") -> None:
        """Publish what this process is, at start, and where its model turns out to be called otherwise. `platform` and
        `device_kind` are jax's words for what it computes on; a router computes nothing."""
        self._build_info.clear()
        named = {"role": role, "model": model, "version": version, "platform": platform, "device_kind": device_kind}
        self._build_info.labels(python=python_version(), **named).set(1)

    def set_ready(self, is_ready: Callable[[], bool]) -> None:
        """Ask at every scrape whether this process serves; call once, at start."""
        self._ready.set_function(is_ready)

    def text(self) -> str:
        """Everything in Prometheus text format 0.0.4 (`CONTENT_TYPE`)."""
        return generate_latest(self.registry).decode("utf-8")


def _part(used: Gauge, free: Gauge) -> float:
    held, rest = (sum(sample.value for family in gauge.collect() for sample in family.samples) for gauge in (used, free))
    return held / (held + rest) if held + rest else 0.0
