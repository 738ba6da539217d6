"""The workers under test: unified, P and D, each on cores of its own, all with equal settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_kit.servers import Server, Servers

PATIENCE_S = 300.0
PAGE_SIZE = 16
CHUNK_TOKENS = 512  # prompt tokens of one prefill step
PIECE_TOKENS = 256
MAX_NUM_SEQS = 8


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who is compared."""

    unified: Server  # on P's core
    prefill: Server
    decode: Server  # on a core of its own
    unified_wide: Server | None  # on both cores: the same hardware as P and D together
    decode_log: Path  # debug lines included
    prefill_schedule: Path


@contextmanager
def started(
    model: Path, work: Path, cores: tuple[str, str], *, max_model_len: int, num_pages: int, wide: bool
) -> Iterator[Workers]:
    """Everything that a run needs, ended with it; `work` takes logs. Raises RuntimeError with the end of a log when a
    worker does not come up."""
    servers = Servers(
        lambda name: work / f"{name}.log",
        lambda: PATIENCE_S,
        *("--model", str(model), "--load-format", "dummy", "--served-model-name", "bench"),
        *("--dtype", "float32", "--max-model-len", str(max_model_len), "--num-pages", str(num_pages)),
        *("--page-size", str(PAGE_SIZE), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--max-num-batched-tokens", str(CHUNK_TOKENS), "--transfer-chunk-tokens", str(PIECE_TOKENS)),
        *("--port", "0", "--step-timeout-s", "120", "--drain-s", "2"),
        *("--dead-after-s", "10", "--lease-s", "60"),  # a busy machine makes figures worse, it does not end the run
    )

    def start(name: str, cores: str, *flags: str) -> Server:
        process, _ = servers.launch(name, "--cpu-affinity", cores, *flags)
        return servers.wait(process)

    def logged(name: str) -> tuple[str, str]:
        """P's schedule is read; the unified worker's costs it as much; D's would cost a tenth of its steps, which are short."""
        return ("--schedule-log", str(work / f"{name}.schedule"))

    p_core, d_core = cores
    both, unified_flags = f"{p_core},{d_core}", ("--role", "unified")
    try:
        prefill = start("prefill", p_core, "--role", "prefill", *logged("prefill"))
        decode_flags = ("--role", "decode", "--prefill", str(prefill.ready.grpc), "--local-prefill", "never")
        yield Workers(
            prefill=prefill,
            decode=start("decode", d_core, *decode_flags),
            unified=start("unified", p_core, *unified_flags, *logged("unified")),
            unified_wide=start("unified-wide", both, *unified_flags, *logged("unified-wide")) if wide else None,
            decode_log=work / "decode.log",
            prefill_schedule=work / "prefill.schedule",
        )
    finally:
        servers.close()
