"""Flags and keys of other servers: who writes one is told what it is called here, or what to do instead."""

import re

import pytest

from jdisagg.core import foreign_flags
from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import BY_NAME
from jdisagg.core.requests import MAX_LOGPROBS
from jdisagg.core.settings import build_parser
from tests.unit.core.loading import load

USUAL = """
--model --model-path --tokenizer --tokenizer-mode --tokenizer-revision --revision --trust-remote-code --dtype --load-format
--max-model-len --context-length --generation-config --override-generation-config --sampling-defaults --chat-template
--chat-template-content-format --default-chat-template-kwargs --hf-chat-template-name --enable-auto-tool-choice
--tool-call-parser --reasoning-parser --tool-server --limit-mm-per-prompt --mm-processor-kwargs --enable-multimodal --task
--runner --is-embedding --kv-cache-dtype --swap-space --cpu-offload-gb --kv-offloading-size --enable-hierarchical-cache
--hicache-ratio --hicache-size --enforce-eager --compilation-config -O --disable-cuda-graph --cuda-graph-max-bs --cuda-graph-bs
--enable-torch-compile --skip-server-warmup --attention-backend --sampling-backend --disable-custom-all-reduce
--enable-p2p-check --async-scheduling --no-async-scheduling --disable-overlap-schedule --stream-interval
--num-continuous-decode-steps --disable-log-requests --enable-log-requests --log-requests --log-requests-level
--uvicorn-log-level --log-level --log-level-http --disable-uvicorn-access-log --disable-access-log-for-endpoints --max-log-len
--enable-prompt-tokens-details --enable-cache-report --enable-request-id-headers --enable-force-include-usage
--otlp-traces-endpoint --enable-trace --ssl-keyfile --ssl-certfile --ssl-ca-certs --root-path --fastapi-root-path --middleware
--uds --allowed-origins --allowed-methods --allowed-headers --allow-credentials --disable-fastapi-docs --api-key
--admin-api-key --api-server-count --tokenizer-worker-num --tensor-parallel-size --tp -tp --pipeline-parallel-size --pp -pp
--data-parallel-size --dp -dp --enable-expert-parallel --ep --ep-size --nnodes --node-rank --dist-init-addr --master-addr
--headless --distributed-executor-backend --data-parallel-size-local --data-parallel-address --data-parallel-rpc-port
--base-gpu-id --device --kv-transfer-config --disaggregation-mode --disaggregation-transfer-backend
--disaggregation-bootstrap-port --disaggregation-ib-device --max-logprobs --schedule-policy --schedule-conservativeness
--enable-priority-scheduling --schedule-low-priority-values-first --enable-deterministic-inference --allow-auto-truncate
--max-loras --max-lora-rank --quantization -q --speculative-config --speculative-num-steps --speculative-draft-model-path
--http-port --worker-urls
"""


def test_foreign_flags_are_called_as_ours_are_and_none_of_them_is_ours() -> None:
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    assert set(foreign_flags._CALLED.values()) <= ours
    assert not {name for name in (*foreign_flags._CALLED, *foreign_flags._NOTHING) if name in ours}


def test_vllms_switch_for_tool_calls_is_told_what_reads_them() -> None:
    with pytest.raises(
        ConfigError, match=r"--enable-auto-tool-choice: unknown flag; tool calls are read .* --tool-call-parser"
    ):
        load("--enable-auto-tool-choice")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("tool_call_parser", "qwen", "it is called hermes here"),
        ("tool_call_parser", "llama3", "it is called llama3_json here"),
        ("tool_call_parser", "qwen3_coder", "force calls by tool_ch"),
        ("reasoning_parser", "qwen3", "it is called deepseek_r1 here"),
        ("reasoning_parser", "DeepSeek_R1", "it is called deepseek_r1 here"),
        ("reasoning_parser", "mistral", "leave it out: <think>..</think> is found without it"),
        ("dtype", "half", "write bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3", "int8"),
        ("kv_transfer_backend", "nixl", "leave it out: auto"),
    ],
)
def test_values_of_other_servers_are_told_what_to_write(write, name: str, value: str, told: str) -> None:
    flag, section = BY_NAME[name], BY_NAME[name].section
    wanted = f"got '{value}', wanted one of {', '.join(flag.of('decode').choices)}.*; .*{told}"
    with pytest.raises(ConfigError, match=f"{flag.option}: {wanted}"):
        load("--role", "decode", flag.option, value)
    with pytest.raises(ConfigError, match=wanted):
        load("--role", "decode", "--config", write(f"[{section}]\n{name} = '{value}'\n"))


@pytest.mark.parametrize(("name", "value"), [("dtype", "float8"), ("scheduling_policy", "half")])
def test_nothing_is_told_of_values_that_nobody_knows(name: str, value: str) -> None:
    flag = BY_NAME[name]
    with pytest.raises(ConfigError, match=f"{', '.join(flag.choices)}$"):
        load(flag.option, value)


def test_what_an_advice_names_is_a_flag() -> None:
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    for told in foreign_flags._NOTHING.values():
        assert set(re.findall(r"--[a-z-]+", told)) <= ours


def test_who_moves_a_command_line_of_other_servers_is_told_of_every_flag_in_it() -> None:
    """Those of vLLM's and SGLang's that their own guides use."""
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    assert [flag for flag in USUAL.split() if flag not in ours and not foreign_flags.advice(flag)] == []


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("-tp", "it is called --tensor-parallel-size here"),
        ("--gpu-memory-utilization", "it is called --device-memory-utilization here"),
        ("--max-seq-len", "it is called --max-model-len here"),
        ("--chat-template", "write it there"),
        ("--enable-reasoning", "split off wherever --reasoning-parser finds it"),
        ("--tokenizer", "the tokenizer is that of --model"),
        ("--tool-parser-plugin", "formats of calls are those of --tool-call-parser"),
        ("--enable-lora", "merge them into the model"),
        ("--quantization", "weights are not quantized"),
        ("--speculative-config", "tokens are not drafted"),
        ("--structured-outputs-config", "llguidance alone"),
        ("--generation-config", "generation_config.json of the model's directory"),
        ("--default-chat-template-kwargs", "chat_template_kwargs"),
        ("--limit-mm-per-prompt", "prompts are text alone"),
        ("--enable-log-requests", "--slow-request-s"),
        ("--no-enable-log-requests", "--slow-request-s"),
        ("--ssl-keyfile", "let what stands in front of the router speak TLS"),
        ("--root-path", "proxy in front"),
        ("--api-server-count", "start several with --role router"),
        ("--nnodes", "a worker runs on one host"),
        ("--max-logprobs", f"{MAX_LOGPROBS} alternatives"),
        ("--schedule-policy", "it is called --scheduling-policy here"),
        ("--enable-priority-scheduling", "--scheduling-policy priority"),
        ("--enable-deterministic-inference", "--numerics exact"),
        ("--enable-hierarchical-cache", "--host-kv-bytes"),
        ("--admin-api-key", "--client-api-key"),
    ],
)
def test_flags_of_habit_are_told_what_to_do_instead(write, flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: unknown flag; .*{told}"):
        load(flag, "x")
    if flag.startswith("--"):
        key = flag[2:].replace("-", "_")
        with pytest.raises(ConfigError, match=rf"\[model\] {key}: unknown key; .*{told}"):
            load("--config", write(f"[model]\n{key} = 'x'\n"))
