"""What a user can get wrong at the start: flags, files, models, ports. Exit status 2, one clear line. `-s` prints a table."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.table import Table

COMPILED = re.compile(r"Compiling jit\((\w+)\)")  # as jax logs it, also where its cache holds the program
LATE = {"pool larger than the machine": {"_checksums", "zeroed_pool"}}  # what was compiled before it was seen; else nothing


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    shown = Table()
    yield shown
    print(shown)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Place:
    """Where the cases find broken things."""

    model: Path
    directory: Path
    taken_port: int

    def toml(self, text: str) -> tuple[str, ...]:
        path = self.directory / "wrong.toml"
        path.write_text(text)
        return ("--config", str(path))

    def broken_model(self, change: Callable[[Path], None]) -> tuple[str, ...]:
        path = self.directory / "broken-model"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.model, path)
        change(path)
        return ("--model", str(path))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Place]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield Place(tiny_model, tmp_path_factory.mktemp("wrong"), listener.getsockname()[1])


def change_tensors(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = dict(load_file(directory / "model.safetensors"))
        change(tensors)  # type: ignore[arg-type]
        save_file(tensors, directory / "model.safetensors")

    return apply


def without_norm(tensors: dict[str, object]) -> None:
    del tensors["model.layers.1.input_layernorm.weight"]


def short_projection(tensors: dict[str, object]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].copy()  # type: ignore[index]


def other_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (directory / "config.json").write_text(json.dumps(config))


def cut_weights(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


Flags = tuple[str, ...]
WORKER = ("--role", "unified", "--max-model-len", "64", "--max-num-seqs", "4")
CONFIGURATIONS: dict[str, tuple[Callable[[Place], Flags], tuple[str, ...]]] = {
    "unknown flag": (lambda _: ("--page-sizes", "16"), ("--page-sizes: unknown flag", "did you mean --page-size")),
    "unknown role": (lambda _: ("--role", "decoder"), ("--role", "'decoder'", "decode")),
    "wrong type": (lambda _: ("--num-pages", "many"), ("--num-pages", "'many'", "whole number")),
    "out of range": (lambda _: ("--max-num-seqs", "0"), ("--max-num-seqs", "0")),
    "unknown key in a section": (
        lambda p: p.toml("[cache]\npage_sise = 16\n"),
        ("wrong.toml [cache] page_sise", "did you mean page_size"),
    ),
    "key in the wrong section": (
        lambda p: p.toml("[server]\npage_size = 16\n"),
        ("wrong.toml [server] page_size", "belongs to [cache]"),
    ),
    "wrong type in TOML": (
        lambda p: p.toml('[scheduler]\nmax_num_seqs = "eight"\n'),
        ("wrong.toml [scheduler] max_num_seqs", "'eight'", "whole number"),
    ),
    "not TOML": (lambda p: p.toml("[cache\n"), ("wrong.toml is not TOML", "line 1")),
    "two pool sizes": (
        lambda _: ("--num-pages", "64", "--kv-cache-bytes", "1000000"),
        ("--num-pages", "--kv-cache-bytes", "keep one"),
    ),
    "a flag of another role": (
        lambda _: ("--role", "prefill", "--prefill", "127.0.0.1:9000"),
        ("--prefill: means nothing to --role prefill", "--role decode", "remove it"),
    ),
    "a fleet's flag on one of its workers": (
        lambda _: ("--role", "decode", "--num-prefill", "2"),
        ("--num-prefill: means nothing to --role decode", "--role local", "remove it"),
    ),
    "decode with no way to prefill": (
        lambda _: ("--role", "decode", "--local-prefill", "never"),
        ("--local-prefill", "--prefill"),
    ),
    "no such directory": (lambda _: (*WORKER, "--model", "/no/such/model"), ("--model", "/no/such/model", "not a directory")),
    "no such model on the Hub": (
        lambda _: ("--role", "router", "--model", "nobody/nothing"),
        ("--model", "nobody/nothing", "not in the local Hub cache"),
    ),
    "router, no such model": (
        lambda _: ("--role", "router", "--model", "/no/such/model"),
        ("--model", "/no/such/model", "not a directory"),
    ),
    "missing tensor": (
        lambda p: (*WORKER, *p.broken_model(change_tensors(without_norm))),
        ("broken-model", "missing", "model.layers.1.input_layernorm.weight"),
    ),
    "misshapen tensor": (
        lambda p: (*WORKER, *p.broken_model(change_tensors(short_projection))),
        ("model.safetensors", "model.layers.0.mlp.up_proj.weight", "[95, 64]", "[96, 64]"),
    ),
    "truncated weights": (lambda p: (*WORKER, *p.broken_model(cut_weights)), ("model.safetensors",)),
    "unsupported architecture": (
        lambda p: (*WORKER, *p.broken_model(other_architecture)),
        ("GPT2LMHeadModel", "LlamaForCausalLM"),
    ),
    "no tokenizer": (lambda p: (*WORKER, *p.broken_model(no_tokenizer)), ("tokenizer.json",)),
    "longer than the model": (
        lambda p: (*WORKER, "--model", str(p.model), "--max-model-len", "4096"),
        ("--max-model-len", "4096", "512"),
    ),
    "tp does not divide": (
        lambda p: (*WORKER, "--model", str(p.model), "--tensor-parallel-size", "3"),
        ("--tensor-parallel-size", "3"),
    ),
    "HTTP port in use": (
        lambda p: (*WORKER, "--model", str(p.model), "--port", str(p.taken_port)),
        ("--port", "another"),
    ),
    "gRPC port in use": (
        lambda p: (*WORKER, "--model", str(p.model), "--grpc-port", str(p.taken_port)),
        ("--grpc-port", "another"),
    ),
    "pool too small for one request": (
        lambda p: (*WORKER, "--model", str(p.model), "--page-size", "16", "--num-pages", "4"),
        ("--max-model-len", "64", "--num-pages 5"),
    ),
    "pool of one page": (
        lambda p: ("--role", "unified", "--model", str(p.model), "--num-pages", "1"),
        ("--num-pages", "1", "at least 2"),
    ),
    "pool larger than the machine": (
        lambda p: (*WORKER, "--model", str(p.model), "--kv-cache-bytes", "1000TiB"),
        ("--num-pages", f"{1000 * 2**40} bytes", "more than is free", "lower", "--kv-cache-bytes"),
    ),
    "backend of another role": (
        lambda p: (*WORKER, "--role", "prefill", "--model", str(p.model), "--kv-transfer-backend", "device_put"),
        ("--kv-transfer-backend", "'device_put'", "--role prefill", "grpc"),
    ),
    "local fleet, no such model": (
        lambda _: ("--role", "local", "--model", "/no/such/model"),
        ("--model", "/no/such/model", "not a directory"),
    ),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_bad_configuration_exits_2_with_one_line(case: str, place: Place, table: Table) -> None:
    make_flags, words = CONFIGURATIONS[case]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_LOG_COMPILES": "1"}
    environment.pop("XLA_FLAGS", None)
    flags = make_flags(place)
    if "--port" not in flags and "--config" not in flags:
        flags = (*flags, "--port", "0", "--grpc-port", "0") if "--grpc-port" not in flags else (*flags, "--port", "0")
    used_s = children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg.serve", *flags],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    cpu_s = children_cpu_s() - used_s
    lines = [line for line in done.stderr.splitlines() if "jdisagg.serve: " in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    [line] = lines
    table.add(case, "exit 2", cpu_s, line.replace(str(place.directory), "DIR"))
    for word in words:
        assert word in line
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert set(COMPILED.findall(done.stderr)) == LATE.get(case, set())
