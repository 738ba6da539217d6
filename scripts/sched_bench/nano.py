"""nano-vllm's scheduler and block manager (github.com/GeeeekExplorer/nano-vllm), from a checkout the caller names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from types import ModuleType, SimpleNamespace
from typing import Any

from sched_bench.load import PAGE_SIZE, TOKEN_BUDGET, Load, Tick

INCLUDES = "schedule (sequences of one step: prefill or decode) + postprocess (tokens, ends, page hashes); no output objects"
EOS = 2


def load_nano(folder: Path) -> Callable[[Load], NanoSubject]:
    """Import the scheduler without the package's own __init__, which would bring torch, triton and flash-attn.

    Two stand-ins: the package itself (its path only) and `nanovllm.config` (a name for an annotation; the real class wants
    a model folder). Raises ImportError with the folder's name when it is no checkout.
    """
    if not (folder / "nanovllm" / "engine" / "scheduler.py").is_file():
        raise ImportError(f"{folder} has no nanovllm/engine/scheduler.py; check out nano-vllm there")
    package = ModuleType("nanovllm")
    package.__path__ = [str(folder / "nanovllm")]
    config = ModuleType("nanovllm.config")
    config.__dict__["Config"] = SimpleNamespace
    sys.modules |= {"nanovllm": package, "nanovllm.config": config}
    scheduler = importlib.import_module("nanovllm.engine.scheduler")
    sequence = importlib.import_module("nanovllm.engine.sequence")
    params = importlib.import_module("nanovllm.sampling_params")
    sequence.Sequence.block_size = PAGE_SIZE
    return lambda load: NanoSubject(load, scheduler.Scheduler, sequence.Sequence, params.SamplingParams)


class NanoSubject:
    """See Subject. Its steps are either prefill or decode, and slots do not bound what it admits: only memory does."""

    def __init__(self, load: Load, scheduler: Any, sequence: Any, params: Any) -> None:
        self._sequence = sequence
        self._params = params
        self._scheduler = scheduler(
            SimpleNamespace(
                max_num_seqs=load.running,
                max_num_batched_tokens=TOKEN_BUDGET + load.running,
                eos=EOS,
                kvcache_block_size=PAGE_SIZE,
                num_kvcache_blocks=load.num_pages,
            )
        )
        self._steps = 0

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self._scheduler.add(self._sequence(prompt, self._params(max_tokens=max_tokens)))

    def tick(self) -> Tick:
        """One step."""
        t0 = thread_time_ns()
        sequences, is_prefill = self._scheduler.schedule()
        t1 = thread_time_ns()
        self._steps += 1
        tokens = [100 + self._steps % 1000] * len(sequences)
        before = sum(s.num_completion_tokens for s in sequences)
        t2 = thread_time_ns()
        self._scheduler.postprocess(sequences, tokens, is_prefill)
        t3 = thread_time_ns()
        new = sum(s.num_completion_tokens for s in sequences) - before
        ended = sum(1 for s in sequences if s.is_finished)
        return Tick(t1 - t0, t3 - t2, 0 if is_prefill else len(sequences), new, ended)
