"""Flags of vLLM, SGLang and Dynamo, and their values, that have another name here or mean nothing: what to say of them."""

from __future__ import annotations

from jdisagg.core.requests import MAX_LOGPROBS

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
    "--schedule-policy": "--scheduling-policy",
    "--num-continuous-decode-steps": "--num-scheduler-steps",
    "--base-gpu-id": "--devices",
    "--http-host": "--host",
    "--http-port": "--port",
}
_LOGS = "the environment variable JDISAGG_LOG_LEVEL says what is logged"
_REQUESTS = "requests are in the log that took longer than --slow-request-s (0: every one)"
_METRICS = "GET /metrics is always served"
_TRACES = "no spans are sent; a request's traceparent is in the log of slow ones and goes along to the workers; leave it out"
_ONE_KIND = "a model is spread by --tensor-parallel-size alone; start several workers behind a router for the rest"
_ONE_HOST = "a worker runs on one host, as one process; start others there, with --router HOST:PORT of one router"
_ITS_CONFIG = "the model's config.json says it; write it there"
_ITS_DEFAULTS = (
    "generation_config.json of the model's directory has the defaults of requests; write them there, or take them out"
)
_ITS_TEMPLATE = "the model's directory has it, as chat_template.jinja or in tokenizer_config.json; write it there"
_ITS_REVISION = "the newest one is taken, or what the Hub cache has; download another one and give its directory as --model"
_THOUGHTS = "what a model thinks is split off wherever --reasoning-parser finds it; leave it out"
_EFFORTS = "requests bring it, as reasoning_effort; what a model thinks has no limit of its own beside max_tokens"
_GRAMMARS = "grammars are compiled by llguidance alone; leave it out"
_BLANKS = "a schema says it, by its own key x-guidance; leave it out"
_ADAPTERS = "adapters are not served; merge them into the model"
_WEIGHTS = "weights are not quantized; leave it out (KV is by --kv-cache-dtype int8)"
_DRAFTS = "tokens are not drafted; leave it out"
_COMPILED = "every step is compiled before READY; leave it out"
_KERNELS = "kernels are chosen by the device, and XLA's collectives between devices; leave it out"
_AHEAD = "the next step is always planned while the device computes, and tokens are sent as they come; leave it out"
_HOST_MEMORY = "cached prompts stay on the device; for KV of requests that lost their pages there is --host-kv-bytes"
_TEXT_ONLY = "prompts are text alone, and so are answers; leave it out"
_ALWAYS_SAID = "an answer always has it (usage, x-request-id); leave it out"
_TLS = "what is spoken is plain text; let what stands in front of the router speak TLS"
_PROXY = "paths are as they are, and no code is loaded between; let a proxy in front of the router do it"
_ORIGINS = "--allowed-origins is all that is asked for other pages; leave it out"
_PAIRING = "workers find each other by --router, or --prefill of decode workers, and KV goes by --kv-transfer-backend"
_MORE_ROUTERS = "where one process is too slow for HTTP and tokenizing, start several with --role router"
_NOTHING = {
    **dict.fromkeys(("--hf-overrides", "--hf-config-path", "--json-model-override-args"), _ITS_CONFIG),
    **dict.fromkeys(("--rope-scaling", "--rope-theta"), _ITS_CONFIG),
    **dict.fromkeys(("--generation-config", "--override-generation-config", "--sampling-defaults"), _ITS_DEFAULTS),
    **dict.fromkeys(("--revision", "--tokenizer-revision", "--code-revision"), _ITS_REVISION),
    **dict.fromkeys(("--enable-metrics", "--metrics-port", "--disable-log-stats", "--enable-server-load-tracking"), _METRICS),
    **dict.fromkeys(("--log-level", "--uvicorn-log-level", "--log-level-http", "--log-config-file"), _LOGS),
    **dict.fromkeys(("--disable-log-requests", "--enable-log-requests", "--enable-log-outputs", "--max-log-len"), _REQUESTS),
    **dict.fromkeys(("--log-requests", "--log-requests-level", "--disable-uvicorn-access-log"), _REQUESTS),
    "--disable-access-log-for-endpoints": _REQUESTS,
    **dict.fromkeys(("--otlp-traces-endpoint", "--collect-detailed-traces", "--enable-trace"), _TRACES),
    **dict.fromkeys(("--dp-size", "--dp", "-dp", "--data-parallel-size", "--data-parallel-size-local"), _ONE_KIND),
    **dict.fromkeys(("--pp-size", "--pp", "-pp", "--pipeline-parallel-size"), _ONE_KIND),
    **dict.fromkeys(("--ep-size", "--ep", "--expert-parallel-size", "--enable-expert-parallel"), _ONE_KIND),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr", "--master-addr", "--master-port", "--headless"), _ONE_HOST),
    **dict.fromkeys(("--data-parallel-address", "--data-parallel-rpc-port", "--distributed-executor-backend"), _ONE_HOST),
    **dict.fromkeys(("--enforce-eager", "--compilation-config", "-O", "-O0", "-O1", "-O2", "-O3"), _COMPILED),
    **dict.fromkeys(("--disable-cuda-graph", "--cuda-graph-max-bs", "--cuda-graph-bs", "--cuda-graph-sizes"), _COMPILED),
    **dict.fromkeys(("--max-seq-len-to-capture", "--enable-torch-compile", "--skip-server-warmup"), _COMPILED),
    **dict.fromkeys(("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"), _KERNELS),
    **dict.fromkeys(("--sampling-backend", "--disable-custom-all-reduce", "--enable-p2p-check"), _KERNELS),
    **dict.fromkeys(("--async-scheduling", "--disable-overlap-schedule", "--stream-interval"), _AHEAD),
    **dict.fromkeys(("--kv-offloading-size", "--kv-offloading-backend", "--enable-hierarchical-cache"), _HOST_MEMORY),
    **dict.fromkeys(("--hicache-ratio", "--hicache-size"), _HOST_MEMORY),
    "--cpu-offload-gb": "weights stay on the devices; spread them by --tensor-parallel-size",
    "--device": "the environment variable JAX_PLATFORMS says which kind, --devices which ones",
    "--enable-auto-tool-choice": "tool calls are read wherever tools are offered, see --tool-call-parser; leave it out",
    "--tool-parser-plugin": "formats of calls are those of --tool-call-parser; leave it out, or force calls by tool_choice",
    "--tool-server": "tools are the client's to call; leave it out",
    **dict.fromkeys(("--chat-template", "--hf-chat-template-name", "--trust-request-chat-template"), _ITS_TEMPLATE),
    "--chat-template-content-format": "whether the template reads text or parts is found when it is loaded; leave it out",
    "--default-chat-template-kwargs": "requests bring chat_template_kwargs; where all want the same, write it in the template",
    "--tokenizer": "the tokenizer is that of --model; leave it out",
    "--tokenizer-mode": "the tokenizer is the tokenizer.json of --model; leave it out",
    **dict.fromkeys(("--enable-reasoning", "--reasoning-config", "--reasoning-parser-plugin"), _THOUGHTS),
    **dict.fromkeys(("--reasoning-effort", "--thinking-budget", "--reasoning-budget"), _EFFORTS),
    **dict.fromkeys(("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend"), _GRAMMARS),
    **dict.fromkeys(("--constrained-json-whitespace-pattern", "--constrained-json-disable-any-whitespace"), _BLANKS),
    **dict.fromkeys(("--enable-lora", "--lora-modules", "--lora-paths"), _ADAPTERS),
    **dict.fromkeys(("--max-loras", "--max-lora-rank", "--max-cpu-loras", "--max-loras-per-batch"), _ADAPTERS),
    **dict.fromkeys(("--quantization", "-q", "--quantization-param-path"), _WEIGHTS),
    **dict.fromkeys(("--speculative-config", "--speculative-model", "--num-speculative-tokens"), _DRAFTS),
    **dict.fromkeys(("--speculative-algorithm", "--speculative-num-steps", "--speculative-draft-model-path"), _DRAFTS),
    **dict.fromkeys(("--speculative-eagle-topk", "--speculative-num-draft-tokens"), _DRAFTS),
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path"), _TEXT_ONLY),
    **dict.fromkeys(("--enable-multimodal", "--task", "--runner", "--convert", "--is-embedding"), _TEXT_ONLY),
    "--enable-priority-scheduling": "write --scheduling-policy priority; a lower one goes first",
    "--schedule-low-priority-values-first": "a lower priority always goes first; leave it out",
    "--schedule-conservativeness": "--reserved-decode-tokens and --safety-margin say how much is kept free",
    "--enable-deterministic-inference": "write --numerics exact",
    "--allow-auto-truncate": "prompts are not cut; let the client cut them",
    "--max-logprobs": f"requests may ask for {MAX_LOGPROBS} alternatives; leave it out",
    **dict.fromkeys(("--enable-prompt-tokens-details", "--enable-cache-report", "--enable-request-id-headers"), _ALWAYS_SAID),
    "--enable-force-include-usage": "requests ask for it by stream_options; leave it out",
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--enable-ssl-refresh"), _TLS),
    **dict.fromkeys(("--root-path", "--fastapi-root-path", "--middleware", "--disable-fastapi-docs"), _PROXY),
    "--uds": "HTTP is served at --host and --port; leave it out",
    **dict.fromkeys(("--allowed-methods", "--allowed-headers", "--allow-credentials"), _ORIGINS),
    "--admin-api-key": "--api-key is that of operators; give clients another one, by --client-api-key",
    **dict.fromkeys(("--api-server-count", "--tokenizer-worker-num", "--tokenizer-pool-size"), _MORE_ROUTERS),
    "--worker-urls": "workers register by their own --router; leave it out",
    **dict.fromkeys(("--disaggregation-bootstrap-port", "--disaggregation-ib-device"), _PAIRING),
    "--trust-remote-code": "no code of a model is ever run; leave it out",
}

_HALF = "float16 overflows where bfloat16 does not; write bfloat16"
_FLOAT8 = "KV of eight bits is int8 here"
_THINK_TAGS = (  # names of parsers that read these
    *("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4", "qwen3", "qwen3-thinking", "glm45", "holo2"),
    *("olmo3", "kimi_k2", "minimax_m2", "minimax", "interns1", "nemotron_v3", "nemotron_3", "ernie45", "mimo", "basic"),
)
_TRANSFERS = "leave it out: auto takes the best one that both workers have"
_VALUES = {  # by the name of a setting of ours
    "tool_call_parser": {
        **dict.fromkeys(("qwen", "qwen25", "qwen2_5", "qwen3"), "it is called hermes here"),
        **dict.fromkeys(("llama3", "llama3.1", "llama", "llama4_json"), "it is called llama3_json here"),
    },
    "reasoning_parser": dict.fromkeys(_THINK_TAGS, "it is called deepseek_r1 here, which reads <think>..</think>"),
    "dtype": dict.fromkeys(("float16", "half", "fp16"), _HALF) | dict.fromkeys(("float", "fp32"), "it is called float32 here"),
    "kv_cache_dtype": dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), _FLOAT8),
    "kv_transfer_backend": dict.fromkeys(("nixl", "NixlConnector", "mooncake", "MooncakeConnector", "ascend"), _TRANSFERS),
}
_OTHER_VALUES = {
    "tool_call_parser": "calls in another format stay text: leave it out, and force calls by tool_choice",
    "reasoning_parser": "leave it out: <think>..</think> is found without it, and thoughts in other marks stay part of content",
}


def value_advice(name: str, value: object) -> str:
    """What to write instead of `value` for the setting `name` of ours; "" = nothing is known of it."""
    known = _VALUES.get(name, {})
    told = known.get(value) or known.get(value.lower()) if isinstance(value, str) else ""
    return told or _OTHER_VALUES.get(name, "")


def advice(option: str) -> str:
    """What to do instead of `option`; "" = nothing is known of it."""
    if option in _CALLED:
        return f"it is called {_CALLED[option]} here"
    return _NOTHING.get(option) or _NOTHING.get(option.replace("--no-", "--", 1), "")
