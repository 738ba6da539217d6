"""Which part of a prompt's transfer passed while P still computed it: D's debug log against P's schedule log.

Both write times of the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIECE = re.compile(r"request (\S+): piece \[(\d+), (\d+)\), (\d+) bytes, fetched from ([\d.]+) to ([\d.]+)$")


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """One piece on its way."""

    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One prompt."""

    num_chunks: int
    fetch_s: float  # all pieces together
    hidden_s: float  # the part of it before the first token arrived
    first_before_last: bool  # the first piece was all there when the last chunk started

    @property
    def hidden_share(self) -> float:
        """0 to 1."""
        return self.hidden_s / self.fetch_s if self.fetch_s else 0.0


class OverlapLog:
    """What the two logs hold, read once when the run is over."""

    def __init__(self, decode_log: Path, prefill_schedule: Path) -> None:
        self._fetched = _read_pieces(decode_log)
        self._chunks = _read_chunks(prefill_schedule)

    def of(self, request_id: str, first_token_s: float) -> Overlap:
        """Of a request whose first token arrived at `first_token_s`. Raises RuntimeError when the logs do not know it."""
        pieces = [piece for key, fetched in self._fetched.items() if _is_of(key, request_id) for piece in fetched]
        starts_s = [time_s for key, times in self._chunks.items() if _is_of(key, request_id) for time_s in times]
        if not pieces or not starts_s:
            raise RuntimeError(
                f"{request_id}: {len(pieces)} pieces and {len(starts_s)} chunks in the logs, wanted some of both"
            )
        return Overlap(
            num_chunks=len(starts_s),
            fetch_s=sum(piece.ended_s - piece.began_s for piece in pieces),
            hidden_s=sum(max(0.0, min(piece.ended_s, first_token_s) - piece.began_s) for piece in pieces),
            first_before_last=min(piece.ended_s for piece in pieces) < max(starts_s),
        )


def _is_of(engine_request_id: str, request_id: str) -> bool:
    """An engine's id is the client's with a suffix per choice and hand-off."""
    return re.fullmatch(re.escape(request_id) + r"([^\d].*)?", engine_request_id) is not None


def _read_pieces(path: Path) -> dict[str, list[Fetched]]:
    fetched: dict[str, list[Fetched]] = {}
    for line in path.read_text(errors="replace").splitlines():
        if found := _PIECE.search(line):
            piece = Fetched(began_s=float(found[5]), ended_s=float(found[6]))
            fetched.setdefault(found[1], []).append(piece)
    return fetched


def _read_chunks(path: Path) -> dict[str, list[float]]:
    """Per request, when each of its chunks started: once dispatched, and the step before it was read."""
    starts: dict[str, list[float]] = {}
    waiting: dict[str, Any] | None = None  # the plan dispatched behind a step that still runs
    done_s = 0.0
    for line in path.read_text().splitlines():
        call = json.loads(line)
        if call["call"] == "schedule" and "step_id" in (call.get("result") or {}):
            waiting = {"plan": call["result"], "at_s": float(call["args"][0])}
            _start(starts, waiting, done_s)
        elif call["call"] == "commit":
            done_s = float(call["at_s"])
            if waiting is not None and waiting["plan"]["step_id"] > call["args"][0]["step_id"]:
                _start(starts, waiting, done_s)
    return starts


def _start(starts: dict[str, list[float]], waiting: dict[str, Any], done_s: float) -> None:
    """Note (again) when the chunks of a plan start; the later notice holds."""
    for chunk in waiting["plan"].get("prefill", ()):
        times = starts.setdefault(chunk["request_id"], [])
        number = waiting.setdefault("numbers", {}).setdefault(chunk["request_id"], len(times))
        del times[number:]
        times.append(max(waiting["at_s"], done_s))
