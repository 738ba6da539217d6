"""The worker module with sampler and runner probed: raw logits are written down for tests that compare bits.

Every sampled token of a request whose id starts with "probe" leaves `PROBE_DIR/{request}.{index in its sequence}.npy`, f32[V]:
what the sampler was given, read back from the device. Nothing else changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdisagg.core.config import Config
from jdisagg.engine import build, runner, sampler, steps
from jdisagg.serve import worker
from jdisagg.serve.process import Process
from tests.e2e.probed_serve import PROBE_DIR


async def serve(config: Config, process: Process) -> int:
    """The worker module's `serve`, probed."""
    steps.sample = sample
    build.ModelRunner = ProbedRunner
    return await worker.serve(config, process)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Probed(sampler.Sampling):
    """Sampling and what it was given."""

    logits: jax.Array  # f32[R, V]


def sample(logits: Any, *args: Any) -> Probed:
    """`sampler.sample`, probed."""
    return Probed(**vars(sampler.sample(logits, *args)), logits=logits)


class ProbedRunner(runner.ModelRunner):
    """Knows whose tokens and which positions the rows of its steps are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.directory = Path(os.environ[PROBE_DIR])
        self.names: dict[int, str] = {}  # slot -> request
        self.next: dict[int, int] = {}  # slot -> index of the next sampled token
        self.wanted: dict[int, list[tuple[int, int, str]]] = {}  # step -> (part, row, file)

    def dispatch(self, plan: Any) -> Any:
        for admit in plan.admit:
            self.names[admit.slot] = admit.request_id.split("#")[0].replace("/", "-")  # P adds the attempt
            self.next[admit.slot] = len(admit.prompt_token_ids) + len(admit.generated_token_ids)
        handle = super().dispatch(plan)
        self.wanted[plan.step_id] = list(self._files(handle))
        return handle

    def _files(self, handle: Any) -> Iterator[tuple[int, int, str]]:
        for number, part in enumerate(handle.parts):
            for row, slot in part.packed.samples:
                yield number, row, f"{self.names[slot]}.{self.next[slot]}.npy"
                self.next[slot] += 1

    def collect(self, handle: Any) -> Any:
        for number, row, name in self.wanted.pop(handle.step_id):
            if name.startswith("probe"):
                np.save(self.directory / name, np.asarray(handle.parts[number].out.sampling.logits)[row])
        return super().collect(handle)
