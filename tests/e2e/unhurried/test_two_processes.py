"""The smallest deployment: one prefill process, one decode process, no router, whichever starts first."""

from __future__ import annotations

from fleet_process import free_port

from tests.e2e.client import Asked, run_all
from tests.e2e.conftest import PATIENT, Start
from tests.e2e.processes import ServerProcess, wait_until

ASK = Asked(prompt="def read_lines(path):", sampling={"max_tokens": 16, "temperature": 0.0, "ignore_eos": True})


def answer(decode: ServerProcess) -> tuple[list[int], str]:
    """Tokens of the answer and the worker that prefilled it."""
    (got,) = run_all(decode.grpc, [ASK])
    assert got.error is None, got.error
    assert got.complete is not None
    return list(got.complete.choices[0].token_ids), got.complete.choices[0].provenance.prefill_worker


def test_decode_first_then_prefill_then_prefill_restarted(start: Start, exact_flags: tuple[str, ...]) -> None:
    port = free_port()
    flags = ("--prefill", f"127.0.0.1:{port}", "--local-prefill", "never", *PATIENT, *exact_flags)
    decode = start("decode", "--role", "decode", *flags)
    prefill_flags = ("--role", "prefill", "--grpc-port", str(port), *exact_flags)
    prefill = start("prefill", *prefill_flags).wait_ready()
    decode.wait_ready()
    wait_until(lambda: decode.get("/ready")[0] == 200, 20, "decode ready once its peer is there")
    first, worker = answer(decode)
    assert len(first) == 16
    assert f"pid {prefill.pid}" in worker

    prefill.kill()
    again = start("prefill", *prefill_flags).wait_ready()
    wait_until(lambda: decode.get("/ready")[0] == 200, 20, "decode ready again")
    second, worker = answer(decode)
    assert second == first
    assert f"pid {again.pid}" in worker


def test_prefill_first(pair: object) -> None:
    decode = pair.decode  # type: ignore[attr-defined]
    tokens, worker = answer(decode)
    assert len(tokens) == 16
    assert "pid" in worker
