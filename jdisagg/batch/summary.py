"""What a batch's output holds, and what is told of it at the end: what failed first, and why, and how many lines did."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from jdisagg.batch import strict_json
from jdisagg.batch.passes import tell_of_pass
from jdisagg.batch.results import is_answered, number_of, read_output, stays, weights_of
from jdisagg.core.told import told

NAMED = 3  # failed lines; the others are counted
_NAME_CHARS, _REASON_CHARS = 80, 200
_WEIGHTS_CHARS = 16  # of a fingerprint


class Summary:
    """Of the lines of one output, as far as they were added."""

    def __init__(self) -> None:
        self.num_failed = 0  # ok is an answer with HTTP status 200
        self.has_lines_to_retry = False  # asking again may answer more of them; the others that failed are no requests
        self._ok: Counter[str | None] = Counter()  # by weights
        self._failed: list[str] = []  # the first

    def add(self, line: dict[str, Any]) -> None:
        """An output line; those that fail first are named."""
        if is_answered(line):
            self._ok[weights_of(line["response"].get("body"))] += 1
            return
        self.num_failed += 1
        self.has_lines_to_retry = self.has_lines_to_retry or not stays(line)
        if self.num_failed <= NAMED:
            self._failed.append(f"failed: {_failure(line)}")

    def told(self, output: Path) -> list[str]:
        """The first failed lines, where the others are, and the words "N ok, M failed"; more of them when the server exchanged
        its weights meanwhile."""
        failed = list(self._failed)
        if more := self.num_failed - len(failed):
            failed.append(f'failed: {more} more; in {output} their "response" is null or has another status_code than 200')
        return [*failed, f"{self._ok.total()} ok, {self.num_failed} failed{self._by_weights()}"]

    def _by_weights(self) -> str:
        if len(self._ok) < 2:
            return ""
        counted = self._ok.most_common()
        shares = [f"{count} of {weights[:_WEIGHTS_CHARS] if weights else 'unknown ones'}" for weights, count in counted]
        return f"; the weights changed while the batch ran, these are answers {', '.join(shares)}"


def summary(output: Path) -> Summary:
    """Of a finished output."""
    found = Summary()
    tell_of_pass(output, "how many lines have answers")
    for line in read_output(output):
        if line is not None:
            found.add(line)
    return found


def _failure(line: dict[str, Any]) -> str:
    """Which input line it was, by its number and the name that it has, and what is wrong."""
    number, custom_id, response = number_of(line), line.get("custom_id"), line["response"]
    name = "" if custom_id in (None, f"line-{number}") else f" ({told(repr(custom_id), _NAME_CHARS)})"
    if response is None:
        reason = _message(line)
        bare = reason.removeprefix(f"line {number}")  # which some messages begin with
        reason = bare if bare[:1] in (" ", ":") else f": {reason}"
    else:
        reason = f": HTTP {response['status_code']}: {_message(response.get('body'))}"
    return f"line {number}{name}{told(reason, _REASON_CHARS)}"


def _message(body: object) -> str:
    """What a body in the form of OpenAI's errors says, or all of another one."""
    match body:
        case {"error": {"message": str(message)}} if message:
            return message
    return strict_json.encode(body).decode()
