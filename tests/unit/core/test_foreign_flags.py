"""Flags and keys of other servers: who writes one is told what it is called here, or what to do instead."""

import pytest

from jdisagg.core import foreign_flags
from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import BY_NAME
from jdisagg.core.settings import build_parser
from tests.unit.core.loading import load


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


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("-tp", "it is called --tensor-parallel-size here"),
        ("--gpu-memory-utilization", "it is called --device-memory-utilization here"),
        ("--max-seq-len", "it is called --max-model-len here"),
        ("--chat-template", "write it there"),
        ("--reasoning-parser", "thoughts stay part of content"),
        ("--tokenizer", "the tokenizer is that of --model"),
        ("--tool-parser-plugin", "formats of calls are those of --tool-call-parser"),
        ("--enable-lora", "merge them into the model"),
        ("--quantization", "weights are not quantized"),
        ("--speculative-config", "tokens are not drafted"),
        ("--structured-outputs-config", "llguidance alone"),
    ],
)
def test_flags_of_habit_are_told_what_to_do_instead(write, flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: unknown flag; .*{told}"):
        load(flag, "x")
    if flag.startswith("--"):
        key = flag[2:].replace("-", "_")
        with pytest.raises(ConfigError, match=rf"\[model\] {key}: unknown key; .*{told}"):
            load("--config", write(f"[model]\n{key} = 'x'\n"))
