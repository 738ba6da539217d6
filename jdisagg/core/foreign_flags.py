"""Flags of vLLM, SGLang and Dynamo that mean something of ours under another name, or nothing here: what to say of them."""

from __future__ import annotations

_CALLED = {
    "--model-path": "--model",
    "--model-name": "--served-model-name",
    "--tokenizer-path": "--model",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--context-length": "--max-model-len",
    "--kv-block-size": "--page-size",
    "--num-gpu-blocks-override": "--num-pages",
    "--max-total-tokens": "--num-pages",
    "--mem-fraction-static": "--device-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-queue-len",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-prefill-tokens": "--max-num-batched-tokens",
    "--kv-events-config": "--enable-kv-events",
    "--disaggregation-mode": "--role",
    "--disaggregation-transfer-backend": "--kv-transfer-backend",
    "--kv-transfer-config": "--kv-transfer-backend",
    "--random-seed": "--seed",
    "--watchdog-timeout": "--step-timeout-s",
    "--shutdown-timeout": "--drain-s",
    "--download-dir": "--model",
}
_LOGS = "the environment variable JDISAGG_LOG_LEVEL says what is logged"
_METRICS = "GET /metrics is always served"
_ONE_KIND = "a model is spread by --tensor-parallel-size alone; start several workers behind a router for the rest"
_ITS_CONFIG = "the model's config.json says it; write it there"
_NOTHING = {
    "--hf-overrides": _ITS_CONFIG,
    "--json-model-override-args": _ITS_CONFIG,
    "--rope-scaling": _ITS_CONFIG,
    "--rope-theta": _ITS_CONFIG,
    "--enable-metrics": _METRICS,
    "--metrics-port": _METRICS,
    "--disable-log-stats": _METRICS,
    "--log-level": _LOGS,
    "--uvicorn-log-level": _LOGS,
    "--disable-log-requests": _LOGS,
    "--enable-log-requests": _LOGS,
    "--dp-size": _ONE_KIND,
    "--data-parallel-size": _ONE_KIND,
    "--pp-size": _ONE_KIND,
    "--pipeline-parallel-size": _ONE_KIND,
    "--enforce-eager": "every step is compiled before READY; leave it out",
    "--disable-cuda-graph": "every step is compiled before READY; leave it out",
    "--enable-auto-tool-choice": "tool calls are read wherever tools are offered, see --tool-call-parser; leave it out",
    "--trust-remote-code": "no code of a model is ever run; leave it out",
}


def advice(option: str) -> str:
    """What to do instead of `option`; "" = nothing is known of it."""
    if option in _CALLED:
        return f"it is called {_CALLED[option]} here"
    return _NOTHING.get(option, "")
