"""Every metric of the process, defined here and nowhere else. Prometheus text format, `jdisagg_*`, base units.

A composition root makes one `Metrics` and hands it down; the parts call `metrics.ttft_seconds.observe(0.12)`. Each instance has
a registry of its own, so two engines in one test do not meet. All metric objects are thread-safe.
"""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

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
_RUNGS = ("refetch", "other_backend", "reconnect", "other_prefill", "local_prefill")
_HEDGE_OUTCOMES = ("moved", "returned", "refused", "abandoned")
_RUNGS_OF_ROUTERS = ("replay",)
# fed by a process without an engine, too; the others would be 0 there for ever
_WITHOUT_ENGINE = frozenset(
    """
    workers build_info time_to_first_token_seconds inter_token_latency_seconds request_decode_seconds generated_tokens
    requests_finished recoveries replays_refused request_seconds requests prompt_tokens
    """.split()
)


class Metrics:
    """All metrics of one process.

    More attributes than a class should have, on purpose: a flat list is what a reader of `/metrics` looks for.
    """

    def __init__(self, *, engine: bool = True) -> None:
        """`engine` False: expose only what a router feeds; a 0 that nobody measured would read as "no page is free"."""
        disable_created_metrics()  # a switch of the library, not of a registry: it would double the number of series
        self.registry = CollectorRegistry(auto_describe=True)
        self._engine = engine
        self._define_state()
        self._define_latencies()
        self._define_counters()

    def _define_state(self) -> None:
        self.requests = self._gauge(
            "requests", "Live requests by state; a router's: running (a worker has it), waiting.", "state"
        )
        self.kv_pages_free = self._gauge("kv_pages_free", "KV pages nobody references (reusable prefix pages included).")
        self.kv_pages_used = self._gauge("kv_pages_used", "KV pages referenced by at least one request.")
        self.published_bytes = self._gauge("published_bytes", "Bytes of KV pieces held for fetching peers.")
        self.peers = self._gauge("peers", "Prefill workers that a decode worker has spoken to.", "state")
        self.leases = self._gauge("leases", "Live hand-offs that a prefill worker serves, and loans of a decode worker.")
        self.workers = self._gauge("workers", "Workers this router knows (decode and unified: connected ones).", "role")
        self.kv_event_listeners = self._gauge("kv_event_listeners", "Streams of KVEventsService that are open.")
        self.build_info = self._gauge("build_info", "Constant 1; the labels name the build.", "role", "model", "python")

    def _define_latencies(self) -> None:
        request, step = _REQUEST_BUCKETS_S, _STEP_BUCKETS_S
        self.ttft_seconds = self._histogram("time_to_first_token_seconds", "Admission to first token sent.", request)
        self.itl_seconds = self._histogram("inter_token_latency_seconds", "Gap between tokens of one stream.", step)
        self.request_queue_seconds = self._histogram(
            "request_queue_seconds", "Time in which nobody worked on a request, here or on a peer.", request
        )
        self.request_prefill_seconds = self._histogram(
            "request_prefill_seconds", "Work on the prompt to first token; again after a preemption.", request
        )
        self.request_transfer_seconds = self._histogram(
            "request_transfer_seconds", "First token known to KV complete: what the transfer adds.", request
        )
        self.request_decode_seconds = self._histogram(
            "request_decode_seconds", "First token, with its KV in place, to last token.", request
        )
        self.request_seconds = self._histogram(
            "request_seconds", "A request from coming to end: the sum of its phases.", request
        )
        self.transfer_seconds = self._histogram("transfer_seconds", "Time to fetch one KV piece.", step, "backend")
        self.step_seconds = self._histogram("step_seconds", "Dispatch of a step to its tokens.", step, "phase")
        self.host_overhead_seconds = self._histogram(
            "host_overhead_seconds", "Host time of one tick that dispatched a step, without waiting.", _HOST_BUCKETS_S
        )

    def _define_counters(self) -> None:
        self.tick_seconds = self._counter("tick_seconds", "Time of an engine's thread by stage of its tick.", "stage")
        self.prefill_tokens = self._counter("prefill_tokens", "Prompt tokens computed, by the role that did it.", "role")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens sampled and delivered.")
        self.requests_finished = self._counter("requests_finished", "Requests that ended, by finish reason or error.", "reason")
        self.transfer_bytes = self._counter("transfer_bytes", "KV bytes received and verified, by backend.", "backend")
        self.transfer_failures = self._counter("transfer_failures", "KV pieces that did not arrive.", "backend", "reason")
        self.transfer_hidden_seconds = self._counter(
            "transfer_hidden_seconds", "The part of transfer_seconds that passed while the prompt was still computed."
        )
        self.borrowed_tokens = self._counter(
            "borrowed_tokens", "Tokens that were fetched from the receiver instead of computed."
        )
        self.borrowings = self._counter("borrowings", "KV asked back from a receiver, by how it ended.", "outcome")
        self.recoveries = self._counter("recoveries", "Steps taken to survive failures, by rung.", "rung")
        self.prefill_hedges = self._counter("prefill_hedges", "Prompts for which a second P was asked, by outcome.", "outcome")
        for outcome in _HEDGE_OUTCOMES:
            self.prefill_hedges.labels(outcome=outcome)
        for rung in _RUNGS if self._engine else _RUNGS_OF_ROUTERS:  # an alert on an increase must see the first
            self.recoveries.labels(rung=rung)
        self.replays_refused = self._counter("replays_refused", "Requests that failed as the replay budget was spent.")
        self.prefix_cache_query_tokens = self._counter("prefix_cache_query_tokens", "Prompt tokens looked up in the cache.")
        self.forks = self._counter("forks", "Choices that took the KV of a sibling's prompt.")
        self.host_kv_tokens = self._counter("host_kv_tokens", "KV moved to host memory (out) and back (in).", "direction")
        self.dispatched_decode_steps = self._counter("dispatched_decode_steps", "Decode steps; several may be one dispatch.")
        self.prefix_cache_hit_tokens = self._counter("prefix_cache_hit_tokens", "Prompt tokens served from the prefix cache.")
        self.kv_events = self._counter("kv_events", "Published changes of the prefix cache: stored, removed, cleared.", "kind")
        self.preemptions = self._counter(
            "preemptions", "Times a running request, or a computed prompt that waited, gave up its pages."
        )
        self.retractions = self._counter("retractions", "Decode requests retracted and resumed later.")
        self.nan_requests = self._counter("nan_requests", "Requests failed because their logits held NaN or infinity.")
        self.compiles_after_ready = self._counter("compiles_after_ready", "XLA compilations after READY; stays 0.")

    def set_build(self, *, role: str, model: str) -> None:
        """Publish what this process is; call once, at start."""
        self.build_info.labels(role=role, model=model, python=platform.python_version()).set(1)

    def text(self) -> str:
        """Everything in Prometheus text format 0.0.4 (`CONTENT_TYPE`)."""
        return generate_latest(self.registry).decode("utf-8")

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"jdisagg_{name}", help_text, labels, registry=self._registry_of(name))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"jdisagg_{name}_total", help_text, labels, registry=self._registry_of(name))

    def _histogram(self, name: str, help_text: str, buckets_s: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"jdisagg_{name}", help_text, labels, registry=self._registry_of(name), buckets=buckets_s)

    def _registry_of(self, name: str) -> CollectorRegistry | None:
        return self.registry if self._engine or name in _WITHOUT_ENGINE else None
