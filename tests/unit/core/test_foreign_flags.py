"""Flags and keys of other servers: who writes one is told what it is called here, or what to do instead."""

import pytest

from jdisagg.core import foreign_flags
from jdisagg.core.errors import ConfigError
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
    ("value", "told"),
    [
        ("qwen", "it is called hermes here"),
        ("llama3", "it is called llama3_json here"),
        ("qwen3_coder", "force calls by tool_ch"),
    ],
)
def test_parsers_of_other_servers_are_told_what_to_write(write, value: str, told: str) -> None:
    wanted = f"got '{value}', wanted one of auto, none, hermes, llama3_json, mistral; .*{told}"
    with pytest.raises(ConfigError, match=f"--tool-call-parser: {wanted}"):
        load("--tool-call-parser", value)
    with pytest.raises(ConfigError, match=wanted):
        load("--config", write(f"[model]\ntool_call_parser = '{value}'\n"))


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
