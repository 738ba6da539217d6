"""What comes of one choice, and how it differs from what should have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jdisagg.v1 import common_pb2, generation_pb2

_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


class Flaw(Enum):
    """What is wrong with a choice."""

    WRONG = "wrong"
    LOST = "lost"
    DUPLICATED = "duplicated"
    MISTOLD = "mistold"  # its tokens are right; its text, log probabilities or finish reason are not


@dataclass
class Choice:
    """As its client sees it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)  # of each token: its own, and those of alternatives by name
    finish: str | None = None

    @classmethod
    def of(cls, part: generation_pb2.Delta | generation_pb2.Choice) -> Choice:
        """What a message of gRPC brings."""
        finish = _FINISH.get(part.finish, str(part.finish)) if part.finish else None
        scores = [_scored(score) for score in part.logprobs] if isinstance(part, generation_pb2.Delta) else []
        return cls(list(part.token_ids), part.text, scores, finish)

    def add(self, new: Choice) -> None:
        """More of it arrives."""
        self.tokens += new.tokens
        self.text += new.text
        self.logprobs += new.logprobs
        self.finish = new.finish or self.finish

    def flaw_beside(self, right: Choice, *, whole: bool) -> Flaw | None:
        """How it differs from the `right` one, or from a beginning of it unless it should be the `whole`."""
        if flaw := flaw_of(self.tokens, right.tokens, whole=whole):
            return flaw
        begins = right.text.startswith(self.text) and right.logprobs[: len(self.logprobs)] == self.logprobs
        ends = self.finish in (None, right.finish) if not whole else self == right
        return None if begins and ends else Flaw.MISTOLD


def _scored(score: common_pb2.TokenLogprob) -> tuple[float, dict[str, float]]:
    """As HTTP has it with `return_tokens_as_token_ids`: the chosen token is always among the alternatives."""
    top = {f"token_id:{each.token_id}": each.logprob for each in score.top}
    return score.logprob, {f"token_id:{score.token_id}": score.logprob} | top


def flaw_of(got: Sequence[int], wanted: Sequence[int], *, whole: bool) -> Flaw | None:
    """How the tokens `got` differ from `wanted`, or from a beginning of it unless they should be the `whole`."""
    same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    rest = got[same:]
    if not rest:
        return Flaw.LOST if whole and len(got) < len(wanted) else None
    window = rest[:8]
    if any(wanted[at : at + len(window)] == window for at in range(same + 1, len(wanted))) and len(window) > 1:
        return Flaw.LOST
    if any(wanted[at : at + len(window)] == window for at in range(same)):
        return Flaw.DUPLICATED
    return Flaw.DUPLICATED if len(got) > len(wanted) and same == len(wanted) else Flaw.WRONG
