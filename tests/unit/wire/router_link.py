"""A router's link to one worker, that keeps all it is told in lists."""

from __future__ import annotations

from jdisagg.api.worker.client import WorkerLink
from jdisagg.core.fleet import Load
from jdisagg.core.requests import Output
from tests.unit.wire.rig import FAST


class Client:
    """A router's link with lists for callbacks."""

    def __init__(self, address: str, waited_for_s: float = 0.0) -> None:
        self.ups = 0
        self.batches: list[list[Output]] = []
        self.downs: list[str] = []
        self.loads: list[Load] = []
        self.link = WorkerLink(
            address,
            config=FAST,
            on_outputs=self.batches.append,
            on_up=self._up,
            on_down=self.downs.append,
            on_load=lambda load, num_cancelled: self.loads.append(load),
            on_quiet=lambda is_quiet: None,
            waits=lambda silent_s: silent_s < waited_for_s,
        )

    def _up(self) -> None:
        self.ups += 1

    def outputs(self, request_id: str) -> list[Output]:
        return [output for batch in self.batches for output in batch if output.request_id == request_id]
