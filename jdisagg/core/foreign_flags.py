"""Flags of vLLM, SGLang and Dynamo, and their values, that have another name here or mean nothing: what to say of them."""

from __future__ import annotations

_CALLED = {
    "--model-path": "--model",
    "--model-name": "--served-model-name",
    "--tokenizer-path": "--model",
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--context-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--kv-block-size": "--page-size",
    "--num-gpu-blocks-override": "--num-pages",
    "--max-total-tokens": "--num-pages",
    "--gpu-memory-utilization": "--device-memory-utilization",
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
    "--swap-space": "--host-kv-bytes",
    "--random-seed": "--seed",
    "--watchdog-timeout": "--step-timeout-s",
    "--shutdown-timeout": "--drain-s",
    "--download-dir": "--model",
}
_LOGS = "the environment variable JDISAGG_LOG_LEVEL says what is logged"
_METRICS = "GET /metrics is always served"
_ONE_KIND = "a model is spread by --tensor-parallel-size alone; start several workers behind a router for the rest"
_ITS_CONFIG = "the model's config.json says it; write it there"
_ITS_TEMPLATE = "the model's directory has it, as chat_template.jinja or in tokenizer_config.json; write it there"
_THOUGHTS = "thoughts stay part of content, and are not split off; leave it out"
_GRAMMARS = "grammars are compiled by llguidance alone; leave it out"
_ADAPTERS = "adapters are not served; merge them into the model"
_WEIGHTS = "weights are not quantized; leave it out (KV is by --kv-cache-dtype int8)"
_DRAFTS = "tokens are not drafted; leave it out"
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
    "--tool-parser-plugin": "formats of calls are those of --tool-call-parser; leave it out, or force calls by tool_choice",
    "--chat-template": _ITS_TEMPLATE,
    "--chat-template-content-format": "content is handed to the template as text; leave it out",
    "--tokenizer": "the tokenizer is that of --model; leave it out",
    "--tokenizer-mode": "the tokenizer is the tokenizer.json of --model; leave it out",
    "--reasoning-parser": _THOUGHTS,
    "--enable-reasoning": _THOUGHTS,
    "--guided-decoding-backend": _GRAMMARS,
    "--structured-outputs-config": _GRAMMARS,
    "--grammar-backend": _GRAMMARS,
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--quantization": _WEIGHTS,
    "--speculative-config": _DRAFTS,
    "--speculative-algorithm": _DRAFTS,
    "--trust-remote-code": "no code of a model is ever run; leave it out",
}

_HALF = "float16 overflows where bfloat16 does not; write bfloat16"
_FLOAT8 = "KV of eight bits is int8 here"
_TRANSFERS = "leave it out: auto takes the best one that both workers have"
_VALUES = {  # by the name of a setting of ours
    "tool_call_parser": {
        **dict.fromkeys(("qwen", "qwen25", "qwen2_5", "qwen3"), "it is called hermes here"),
        **dict.fromkeys(("llama3", "llama3.1", "llama", "llama4_json"), "it is called llama3_json here"),
    },
    "dtype": dict.fromkeys(("float16", "half", "fp16"), _HALF) | dict.fromkeys(("float", "fp32"), "it is called float32 here"),
    "kv_cache_dtype": dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), _FLOAT8),
    "kv_transfer_backend": dict.fromkeys(("nixl", "NixlConnector", "mooncake", "MooncakeConnector", "ascend"), _TRANSFERS),
}
_OTHER_VALUES = {"tool_call_parser": "calls in another format stay text: leave it out, and force calls by tool_choice"}


def value_advice(name: str, value: object) -> str:
    """What to write instead of `value` for the setting `name` of ours; "" = nothing is known of it."""
    known = _VALUES.get(name, {}).get(value, "") if isinstance(value, str) else ""
    return known or _OTHER_VALUES.get(name, "")


def advice(option: str) -> str:
    """What to do instead of `option`; "" = nothing is known of it."""
    if option in _CALLED:
        return f"it is called {_CALLED[option]} here"
    return _NOTHING.get(option, "")
