"""The last workers that were lost, for operators: who looks a moment later finds them in no list of those that are there.

Pure bookkeeping: time is passed in. Forgotten when the router restarts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jdisagg.core.fleet import Key, LostWorker, Member

MOST_KEPT = 16
KEPT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Loss:
    member: Member
    why: str
    at_s: float


class LostWorkers:
    """MOST_KEPT of them, each for KEPT_S."""

    def __init__(self) -> None:
        self._losses: deque[_Loss] = deque(maxlen=MOST_KEPT)  # the latest first

    def note(self, member: Member, why: str, now_s: float) -> None:
        """It was lost, maybe not for the first time."""
        self.is_back(member.key)
        self._losses.appendleft(_Loss(member, why, now_s))

    def is_back(self, key: Key) -> None:
        """That process is there again, if it was lost."""
        for loss in [loss for loss in self._losses if loss.member.key == key]:
            self._losses.remove(loss)

    def lately(self, now_s: float, there: frozenset[Key] = frozenset()) -> list[LostWorker]:
        """The latest first; without those that are `there` all the same, such as one whose stream broke and that heartbeats."""
        lost = [loss for loss in self._losses if now_s - loss.at_s <= KEPT_S and loss.member.key not in there]
        return [
            LostWorker(role=loss.member.role, worker=loss.member.worker, why=loss.why, ago_s=now_s - loss.at_s) for loss in lost
        ]
