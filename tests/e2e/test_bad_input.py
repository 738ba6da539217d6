"""What a user can get wrong, and the clear line it gets: flags, files, models, ports, requests, fleets. `-s` prints a table."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import MAX_MODEL_LEN, Pair, Start
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tiny_model import make_tiny_model

CONFIG_CPU_S = 6.0  # interpreter, jax and weights included; a quiet machine needs about two
REQUEST_S = 1.0
GOOD = Asked(prompt=tuple(range(30, 60)), sampling={"max_tokens": 8, "temperature": 0.0, "ignore_eos": True})


class Table:
    """Rows for people who read the output of `-s`."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, float, str]] = []

    def add(self, case: str, status: object, seconds: float, message: str) -> None:
        self._rows.append((case, str(status), seconds, message))

    def __str__(self) -> str:
        return "\n" + "\n".join(
            f"{case:34} {status:>18} {seconds:5.2f} s  {text}" for case, status, seconds, text in self._rows
        )


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    shown = Table()
    yield shown
    print(shown)


# --- configurations: exit status 2 and one line


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
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("XLA_FLAGS", None)
    flags = make_flags(place)
    if "--port" not in flags and "--config" not in flags:
        flags = (*flags, "--port", "0", "--grpc-port", "0") if "--grpc-port" not in flags else (*flags, "--port", "0")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg.serve", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    lines = [line for line in done.stderr.splitlines() if "jdisagg.serve: " in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    [line] = lines
    table.add(case, "exit 2", cpu_s, line.replace(str(place.directory), "DIR"))
    for word in words:
        assert word in line
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert cpu_s < CONFIG_CPU_S


# --- requests: the right status at once, and the server goes on


def post(server: ServerProcess, path: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(server.http + path, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": [30, 31], "max_tokens": 2} | fields).encode()


REQUESTS: dict[str, tuple[str, bytes, int, tuple[str, ...]]] = {
    "unknown model": ("/v1/completions", completion(model="nope"), 404, ("nope", "the served model is")),
    "prompt too long": ("/v1/completions", completion(prompt=[30] * 300), 400, (str(MAX_MODEL_LEN), "300", "shorten")),
    "answer too long": ("/v1/completions", completion(max_tokens=1000), 400, (str(MAX_MODEL_LEN), "1000", "max_tokens")),
    "token id beyond the vocabulary": ("/v1/completions", completion(prompt=[30, 10**6]), 400, ("prompt", "1000000")),
    "negative token id": ("/v1/completions", completion(prompt=[-1]), 400, ("prompt", "-1")),
    "token ids of the wrong type": ("/v1/completions", completion(prompt=[30, "x"]), 400, ("prompt",)),
    "empty prompt": ("/v1/completions", completion(prompt=[]), 400, ("prompt",)),
    "negative max_tokens": ("/v1/completions", completion(max_tokens=-1), 400, ("max_tokens", "-1")),
    "max_tokens is text": ("/v1/completions", completion(max_tokens="many"), 400, ("max_tokens", "many")),
    "n = 0": ("/v1/completions", completion(n=0), 400, ("n must be",)),
    "temperature is NaN": ("/v1/completions", completion(temperature=float("nan")), 400, ("temperature",)),
    "unknown stop type": ("/v1/completions", completion(stop={"a": 1}), 400, ("stop",)),
    "not JSON": ("/v1/completions", b'{"prompt": ', 400, ("JSON",)),
    "not an object": ("/v1/completions", b"[1, 2]", 400, ("object",)),
    "nested beyond reason": ("/v1/completions", b"[" * 200_000, 400, ("JSON",)),
    "no messages": ("/v1/chat/completions", b"{}", 400, ("messages",)),
    "unknown role in a message": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": 5, "content": "x"}]}).encode(),
        400,
        ("role",),
    ),
    "unknown path": ("/v1/nothing", b"{}", 404, ()),
}


def pages_used(server: ServerProcess) -> float:
    return server.metric("jdisagg_kv_pages_used")


def assert_serves(server: ServerProcess) -> None:
    (got,) = run_all(server.grpc, [GOOD])
    assert got.error is None, got.error
    assert len(got.tokens[0]) == 8
    assert server.get("/health")[0] == 200


@pytest.mark.covers("P02")
@pytest.mark.parametrize("name", ["unified", "decode"])
def test_bad_requests_are_answered_at_once(name: str, unified: ServerProcess, pair: Pair, table: Table) -> None:
    server = unified if name == "unified" else pair.decode
    assert_serves(server)
    for case, (path, body, status, words) in REQUESTS.items():
        began_s = time.monotonic()
        got_status, text = post(server, path, body)
        took_s = time.monotonic() - began_s
        error = json.loads(text)["error"]
        table.add(f"{name}: {case}", got_status, took_s, error["message"])
        assert (case, got_status) == (case, status)
        for word in words:
            assert word in error["message"], case
        assert took_s < REQUEST_S
    assert server.state()["streams"] == []
    assert_serves(server)


GRPC_REQUESTS: dict[str, tuple[Asked, grpc.StatusCode, str]] = {
    "prompt too long": (Asked(prompt=(30,) * 300), grpc.StatusCode.INVALID_ARGUMENT, str(MAX_MODEL_LEN)),
    "wrong token id": (Asked(prompt=(30, 10**6)), grpc.StatusCode.INVALID_ARGUMENT, "1000000"),
    "empty prompt": (Asked(prompt=()), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "answer too long": (
        Asked(prompt=(30,), sampling={"max_tokens": 1000}),
        grpc.StatusCode.INVALID_ARGUMENT,
        str(MAX_MODEL_LEN),
    ),
    "n beyond reason": (Asked(prompt=(30,), n=100_000), grpc.StatusCode.INVALID_ARGUMENT, "n must be"),
    "empty stop string": (Asked(prompt=(30,), stop=("",)), grpc.StatusCode.INVALID_ARGUMENT, "stop"),
}


def test_bad_grpc_requests_are_answered_at_once(pair: Pair, table: Table) -> None:
    for case, (asked, status, word) in GRPC_REQUESTS.items():
        began_s = time.monotonic()
        (got,) = run_all(pair.decode.grpc, [asked])
        took_s = time.monotonic() - began_s
        assert got.error is not None, case
        details = got.error.details() or ""
        table.add(f"gRPC: {case}", got.error.code().name, took_s, details)
        assert (case, got.error.code()) == (case, status)
        assert word in details
        assert took_s < REQUEST_S
    assert_serves(pair.decode)


# --- fleets that do not belong together, and fleets that do though they look different


def test_other_weights_are_refused_by_name_and_bystanders_go_on(
    start: Start, pair: Pair, exact_flags: Flags, tmp_path: Path, table: Table
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    flags = ("--role", "decode", "--prefill", pair.prefill.grpc, "--local-prefill", "never")
    stranger = start("stranger", *flags, *exact_flags, "--model", str(other)).wait_ready()
    wait_until(lambda: "fingerprint" in stranger.get("/ready")[1], 10, "/ready names the fingerprint")
    status, text = stranger.get("/ready")
    assert status == 503
    table.add("other weights: GET /ready", status, 0.0, json.loads(text)["reason"])
    (wanted,) = run_all(pair.decode.grpc, [GOOD])
    began_s = time.monotonic()
    (refused,) = run_all(stranger.grpc, [GOOD])
    took_s = time.monotonic() - began_s
    assert refused.error is not None
    table.add("other weights: a request", refused.error.code().name, took_s, refused.error.details() or "")
    assert "fingerprint" in (refused.error.details() or "")
    assert refused.error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
    assert took_s < 5
    (got,) = run_all(pair.decode.grpc, [GOOD])
    assert got.essence() == wanted.essence()
    assert stranger.get("/health")[0] == 200


def test_other_page_size_and_tensor_parallelism_are_converted(start: Start, pair: Pair, exact_flags: Flags) -> None:
    flags = ("--role", "decode", "--prefill", pair.prefill.grpc, "--local-prefill", "never")
    sizes = ("--page-size", "8", "--tensor-parallel-size", "2")
    decode = start("odd", *flags, *exact_flags, *sizes, "--no-enable-prefix-caching").wait_ready()
    wait_until(lambda: decode.get("/ready")[0] == 200, 10, "the pair works")
    (wanted,) = run_all(pair.decode.grpc, [GOOD])
    (got,) = run_all(decode.grpc, [GOOD])
    assert got.error is None, got.error
    assert got.tokens == wanted.tokens  # greedy in float32: sums of another order, the same choice
    assert got.complete is not None
    provenance = got.complete.choices[0].provenance
    assert provenance.transferred_tokens == len(GOOD.prompt)
    assert provenance.prefill_worker.startswith(f"pid {pair.prefill.pid} ")
