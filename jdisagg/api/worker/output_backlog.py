"""Outputs on their way to a router. Where it does not take them as fast as they come, those of one request become one: a router
that falls behind gets fewer of them with more tokens each, and catches up.
"""

from __future__ import annotations

from collections import deque

from jdisagg.api.channels import fill_message
from jdisagg.v1 import common_pb2

MOST_TOKENS = 64  # of an output that several have become: a router's loop takes it at once, log-probabilities and all


class OutputBacklog:
    """In order for each request. Owns what is put in, and changes it."""

    def __init__(self) -> None:
        self._waiting: deque[common_pb2.Output] = deque()
        self._latest: dict[tuple[str, int], common_pb2.Output] = {}  # of those that may take more; made when there is more

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, outputs: list[common_pb2.Output]) -> None:
        """Behind what waits, or into it."""
        if not self._waiting:  # the router keeps up
            self._waiting += outputs
            return
        if not self._latest:
            self._latest = {_key(output): output for output in self._waiting}
        for output in outputs:
            before = self._latest.get(_key(output))
            if before is not None and _takes(before, output):
                _add(before, output)
            else:
                self._latest[_key(output)] = output
                self._waiting.append(output)

    def fill(self) -> list[common_pb2.Output]:
        """Take what one message takes."""
        self._latest = {}
        return fill_message(self._waiting, lambda output: output)


def _key(output: common_pb2.Output) -> tuple[str, int]:
    return output.request_id, output.attempt


def _takes(before: common_pb2.Output, output: common_pb2.Output) -> bool:
    """An error stays alone: who reads one takes no tokens with it."""
    fits = len(before.token_ids) + len(output.token_ids) <= MOST_TOKENS
    return fits and not before.finish and not output.HasField("error")


def _add(before: common_pb2.Output, output: common_pb2.Output) -> None:
    """Lists grow, and what `output` says besides stands."""
    if output.HasField("provenance"):
        before.ClearField("provenance")  # has a list, too, and the later one is whole
    before.MergeFrom(output)
