"""What the host decided for one step, as plain data, and what the device answered.

`runner.dispatch(plan)` is the only way to the device. A Plan holds ints, floats and tuples only, so that it can be logged,
replayed, and broadcast to the other processes of a multi-host worker. Slots are rows of the device-resident decode state,
[0, max_num_seqs). Order inside a step: evict, admit, page updates, prefill chunks, decode rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.requests import SamplingParams, TokenLogprob

PageTable = tuple[tuple[int, ...], ...]  # per KV group (length 1 today): page ids in token order


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Put one sequence into a slot. All its tokens known on the host are given, so penalties can be rebuilt."""

    slot: int
    request_id: str
    choice: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    page_table: PageTable
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]  # known on the host; when `decodes` the last of them is fed next
    decodes: bool  # True: KV of all but the last token is in place, next is a decode step. False: prefill chunks follow


@dataclass(frozen=True, kw_only=True, slots=True)
class PageAppend:
    """Extend one slot's page table: entry `index` of group `group` becomes `page`."""

    slot: int
    group: int
    index: int
    page: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Compute KV of tokens [start, start + len(token_ids)) of the sequence in `slot`.

    `samples`: this chunk ends at the sequence's last known token, so a token is sampled; it lands in the slot's state on the
    device and may be decoded in the next step before the host has seen it. `targets`: next-token ids whose log-probability
    is wanted for each position (prompt logprobs), or None.
    """

    slot: int
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    targets: tuple[int, ...] | None = None
    num_top: int = 0  # alternatives per prompt position


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step. `decode` lists slots that advance by one token (their last token may still be on the device only)."""

    step_id: int
    evict: tuple[int, ...] = ()
    admit: tuple[Admit, ...] = ()
    pages: tuple[PageAppend, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[int, ...] = ()
    num_lookahead: int = 0

    @property
    def is_empty(self) -> bool:
        """True when nothing has to reach the device."""
        return not (self.evict or self.admit or self.pages or self.prefill or self.decode)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(len(chunk.token_ids) for chunk in self.prefill) + len(self.decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Tokens one slot produced in one step; `bad` names a NaN (the request fails, alone)."""

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    bad: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What came back of one Plan: a Sampled per sampling prefill chunk and per decode row, keyed by slot."""

    step_id: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)  # slot -> one per `targets` entry
    step_s: float = 0.0
