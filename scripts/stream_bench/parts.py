"""What the processes of the benchmark share: which tokens are made up, what a client asks for, what a process spends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jdisagg.models.resolve import resolve_model
from jdisagg.text.tokenizer import Tokenizer

HOST = "127.0.0.1"
MODEL = "demo"
DEAD_AFTER_S = 60.0  # a process that stands still for a moment is not dead
MAX_MODEL_LEN = 2**20
MAX_TOKENS = 2**18  # nobody ends while something is measured; with log-probabilities no more may be asked for
TOKEN_CHARACTERS = 4  # of every made-up token, so that a client counts tokens by counting text
NUM_TOP = 5  # alternatives where log-probabilities are asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How clients ask."""

    api: str  # completions, chat or grpc
    logprobs: bool

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.api}{' logprobs' if self.logprobs else ''}"

    @property
    def num_top(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return NUM_TOP if self.logprobs else None


KINDS = tuple(Kind(api=api, logprobs=logprobs) for logprobs in (False, True) for api in ("completions", "chat", "grpc"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """For the client process: open streams, wait until all have begun and a little more, look for `window_s`."""

    kind: Kind
    address: str
    num_streams: int
    window_s: float
    pids: tuple[int, ...]  # whose CPU time counts
    checks_text: bool  # whether the tokens are those of `spelled`


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What came in the window of one phase, over all streams."""

    seconds: float
    num_tokens: int
    num_chunks: int
    num_bytes: int  # of the chunks, without HTTP's or gRPC's framing
    cpu_s: tuple[float, ...]  # of `Phase.pids`
    gap_p50_s: float  # between chunks of a stream
    gap_p99_s: float
    sample: bytes  # one chunk

    def cpu_us(self, index: int) -> float:
        """Per token."""
        return 1e6 * self.cpu_s[index] / max(1, self.num_tokens)

    @property
    def tokens_per_s(self) -> float:
        """All streams together."""
        return self.num_tokens / self.seconds


@cache
def tokenizer() -> Tokenizer:
    """That of the demo model."""
    return Tokenizer.from_directory(resolve_model(MODEL))


@cache
def vocabulary() -> tuple[int, ...]:
    """Tokens of TOKEN_CHARACTERS letters or blanks each."""
    spelled = ((token_id, tokenizer().token_text(token_id)) for token_id in range(tokenizer().vocab_size))
    return tuple(i for i, text in spelled if len(text) == TOKEN_CHARACTERS and text.isascii() and text.strip().isalpha())


def token_at(index: int) -> int:
    """The `index`-th token of every stream."""
    return vocabulary()[index * 7 % len(vocabulary())]


def spelled(num_tokens: int) -> str:
    """The text of so many first tokens."""
    return "".join(tokenizer().token_text(token_at(index)) for index in range(num_tokens))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's threads so far, to the nanosecond: `stat` counts in hundredths of a second."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9
