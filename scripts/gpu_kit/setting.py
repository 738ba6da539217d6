"""Where a section runs and how large it may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_kit.findings import Clock


@dataclass(frozen=True, kw_only=True)
class DecodeScale:
    """Decode steps."""

    batches: tuple[int, ...]  # the most telling first, time may run out
    contexts: tuple[int, ...]
    steps: int  # of one measurement


@dataclass(frozen=True, kw_only=True)
class BatchScale:
    """An offline batch: its requests, tokens of each prompt and of each answer."""

    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of one run. Times are medians of `repeats` runs."""

    repeats: int
    num_streams: int  # exact ones, through every engine
    num_killed: int  # streams asked for when P dies: many times what it computes while the blow is on its way
    at_once: int
    stream_tokens: int
    prompt_tokens: tuple[int, int]  # of a stream, least and most
    ttft_prompts: tuple[int, ...]  # tokens
    copy_bytes: int
    matmul_size: int
    piece_bytes: int
    moved_bytes: int  # between two processes
    gathered_tokens: int
    decode: DecodeScale
    prefill_tokens: tuple[int, ...]
    batch: BatchScale


FULL = Scale(
    repeats=5,
    num_streams=200,
    num_killed=96,
    at_once=32,
    stream_tokens=24,
    prompt_tokens=(16, 160),
    ttft_prompts=(1024, 4096),
    copy_bytes=2**31,
    matmul_size=8192,
    piece_bytes=32 * 2**20,  # a chunk of 256 tokens of Llama 3 8B
    moved_bytes=2**30,
    gathered_tokens=4096,
    decode=DecodeScale(batches=(32, 8, 128, 1), contexts=(1024, 8192), steps=10),
    prefill_tokens=(4096, 512, 8192, 2048),
    batch=BatchScale(requests=256, prompt=256, output=128),
)
SMALL = Scale(
    repeats=2,
    num_streams=24,
    num_killed=48,
    at_once=8,
    stream_tokens=8,
    prompt_tokens=(8, 40),
    ttft_prompts=(64,),
    copy_bytes=2**24,
    matmul_size=256,
    piece_bytes=2**20,
    moved_bytes=2**22,
    gathered_tokens=64,
    decode=DecodeScale(batches=(2, 1), contexts=(16, 48), steps=2),
    prefill_tokens=(32,),
    batch=BatchScale(requests=4, prompt=12, output=6),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One section's run. `scratch` is gone when gpu_check ends; `out` stays."""

    name: str
    out: Path
    scratch: Path
    small: bool
    clock: Clock

    @property
    def scale(self) -> Scale:
        """Its sizes."""
        return SMALL if self.small else FULL

    def log(self, name: str) -> Path:
        """Where a process of this section logs to."""
        return self.out / "logs" / f"{self.name}-{name}.log"
