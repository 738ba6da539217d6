"""What a client can get wrong, and fleets that do not belong together: the right status at once. `-s` prints a table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import MAX_MODEL_LEN, PATIENT, Pair, Start
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.table import Table
from tests.e2e.tiny_model import make_tiny_model
from tests.e2e.tries import fair

REQUEST_S = 1.0
T = TypeVar("T")
GOOD = Asked(prompt=tuple(range(30, 60)), sampling={"max_tokens": 8, "temperature": 0.0, "ignore_eos": True})


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    shown = Table()
    yield shown
    print(shown)


# --- requests: the right status at once, and the server goes on


def at_once(ask: Callable[[], T]) -> tuple[T, float]:
    """An answer and how long it took, of the first that came within REQUEST_S, or the last."""

    def timed(_: int) -> tuple[T, float]:
        began_s = time.monotonic()
        return ask(), time.monotonic() - began_s

    return fair(timed, lambda got: got[1] >= REQUEST_S, "a machine that stands still makes an answer late", tries=5)


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
    "nested beyond reason": ("/v1/completions", b"[" * 60_000, 400, ("nested more than",)),
    "lists beyond reason": (
        "/v1/completions",
        b'{"x": [' + b"[]," * 200_000 + b"[]]}",
        413,
        ("65536 lists", "several requests"),
    ),
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
        (got_status, answer), took_s = at_once(lambda path=path, body=body: server.post(path, body))
        error = answer["error"]
        table.add(f"{name}: {case}", got_status, took_s, error["message"])
        assert (case, got_status) == (case, status)
        for word in words:
            assert word in error["message"], case
        assert took_s < REQUEST_S
    wait_until(lambda: not server.state()["streams"], 30, "no stream is left", server.state)
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
        (got,), took_s = at_once(lambda asked=asked: run_all(pair.decode.grpc, [asked]))
        assert got.error is not None, case
        details = got.error.details() or ""
        table.add(f"gRPC: {case}", got.error.code().name, took_s, details)
        assert (case, got.error.code()) == (case, status)
        assert word in details
        assert took_s < REQUEST_S
    assert_serves(pair.decode)


# --- fleets that do not belong together, and fleets that do though they look different


def test_other_weights_are_refused_by_name_and_bystanders_go_on(
    start: Start, pair: Pair, exact_flags: tuple[str, ...], tmp_path: Path, table: Table
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    flags = ("--role", "decode", "--prefill", pair.prefill.grpc, "--local-prefill", "never", *PATIENT)
    stranger = start("stranger", *flags, *exact_flags, "--model", str(other)).wait_ready()
    wait_until(lambda: "weights.embed: wanted" in stranger.get("/ready")[1], 30, "/ready names the weights")
    status, text = stranger.get("/ready")
    assert status == 503
    table.add("other weights: GET /ready", status, 0.0, json.loads(text)["reason"])
    (wanted,) = run_all(pair.decode.grpc, [GOOD])
    began_s = time.monotonic()
    (refused,) = run_all(stranger.grpc, [GOOD])
    took_s = time.monotonic() - began_s
    assert refused.error is not None
    table.add("other weights: a request", refused.error.code().name, took_s, refused.error.details() or "")
    assert "(also: weights.layers, weights.head)" in (refused.error.details() or "")
    assert refused.error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
    assert took_s < 60  # the request had two minutes
    (got,) = run_all(pair.decode.grpc, [GOOD])
    assert got.essence() == wanted.essence()
    assert stranger.get("/health")[0] == 200


def test_a_router_tells_what_differs_between_workers_that_stay_apart(start: Start, exact_flags: tuple[str, ...]) -> None:
    router = start("router", "--role", "router", *exact_flags[:2]).wait_ready()
    joins = ("--router", router.grpc, *exact_flags)
    workers = [start("p", "--role", "prefill", *joins), start("d", "--role", "decode", *joins, "--numerics", "fast")]
    for worker in workers:
        worker.wait_ready()
    told = "do not pair: numerics (prefill exact, decode fast) must be the same on both"
    wait_until(lambda: told in router.log_since_ready(), 20, "the router's warning", router.log_since_ready)
    assert "weights" not in router.log_since_ready()  # they are the same


def test_other_page_size_and_tensor_parallelism_are_converted(start: Start, pair: Pair, exact_flags: tuple[str, ...]) -> None:
    flags = ("--role", "decode", "--prefill", pair.prefill.grpc, "--local-prefill", "never", *PATIENT)
    sizes = ("--page-size", "8", "--tensor-parallel-size", "2")
    decode = start("odd", *flags, *exact_flags, *sizes, "--no-enable-prefix-caching").wait_ready()
    wait_until(lambda: decode.get("/ready")[0] == 200, 30, "the pair works")
    (wanted,) = run_all(pair.decode.grpc, [GOOD])
    (got,) = run_all(decode.grpc, [GOOD])
    assert got.error is None, got.error
    assert got.tokens == wanted.tokens  # greedy in float32: sums of another order, the same choice
    assert got.complete is not None
    provenance = got.complete.choices[0].provenance
    assert provenance.transferred_tokens == len(GOOD.prompt)
    assert provenance.prefill_worker.startswith(f"pid {pair.prefill.pid} ")
