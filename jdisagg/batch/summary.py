"""What is told at the end of a batch's output: what failed first, and why, and how many lines did."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from jdisagg.batch import strict_json
from jdisagg.batch.results import is_answered, number_of, weights_of
from jdisagg.core.told import told

NAMED = 3  # failed lines; the others are counted
_NAME_CHARS, _REASON_CHARS = 80, 200
_WEIGHTS_CHARS = 16  # of a fingerprint


def summary(output: Path) -> list[str]:
    """Of a finished output: its first failed lines, where the others are, and the words "N ok, M failed": ok is an answer with
    HTTP status 200.

    More of them when the server exchanged its weights meanwhile."""
    failed: list[str] = []
    num_failed = 0
    ok: Counter[str | None] = Counter()  # by weights
    with output.open("rb") as file:
        for raw in file:
            line = json.loads(raw)
            if is_answered(line):
                ok[weights_of(line["response"].get("body"))] += 1
                continue
            num_failed += 1
            if num_failed <= NAMED:
                failed.append(f"failed: {_failure(line)}")
    if more := num_failed - len(failed):
        failed.append(f'failed: {more} more; in {output} their "response" is null or has another status_code than 200')
    return [*failed, f"{ok.total()} ok, {num_failed} failed{_by_weights(ok)}"]


def _by_weights(ok: Counter[str | None]) -> str:
    if len(ok) < 2:
        return ""
    shares = [f"{count} of {weights[:_WEIGHTS_CHARS] if weights else 'unknown ones'}" for weights, count in ok.most_common()]
    return f"; the weights changed while the batch ran, these are answers {', '.join(shares)}"


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
