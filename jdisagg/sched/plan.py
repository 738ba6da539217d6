"""What the host decided for one step, as plain data, and what the device answered.

All that is computed goes to the device by `runner.dispatch(plan)`; pieces of a hand-off come and go beside plans, in order with
them (`export_tokens`, `import_tokens`). A Plan holds ints, floats and tuples only, so that it can be logged, replayed, and
broadcast to the other processes of a multi-host worker. Slots are rows of the device-resident decode state,
[0, max_num_seqs). Order inside a step: page copies, offload, evict, admit, page-table appends, restore, prefill chunks, decode
rows (`num_steps` times). Everything before the chunks reads and writes KV as the steps dispatched before left it. Pages are
copied first, as whoever forks in a step may lose its pages in the same one, and what it has then goes to the host.
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
    stop_ids: tuple[int, ...]  # that may end it; masked while it is shorter than min_tokens asks
    page_table: PageTable
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]  # known on the host; when `decodes` the last of them is fed next
    decodes: bool  # True: KV of all but the last token is in place, next is a decode step. False: prefill chunks follow


@dataclass(frozen=True, kw_only=True, slots=True)
class PageAppend:
    """Extend one slot's page table: entry `index` becomes `page`."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """Copy the KV of one whole page to another, for a sequence that goes its own way inside a shared page."""

    source: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCopy:
    """KV of a sequence's tokens [0, num_tokens) in `page_table`, to host memory (offload) or back from there (restore).

    A key has one copy at a time: an offload makes it; a restore, or `Plan.forget`, removes it.
    """

    key: str  # request id
    page_table: PageTable
    num_tokens: int


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
    """One step. `decode` lists slots that advance by `num_steps` tokens (their last token may still be on the device only);
    what a slot produces past its end is dropped at commit, and lands in the null page when no page was reserved for it."""

    step_id: int
    evict: tuple[int, ...] = ()
    admit: tuple[Admit, ...] = ()
    pages: tuple[PageAppend, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[int, ...] = ()
    num_lookahead: int = 0
    num_steps: int = 1  # decode steps of this dispatch
    copies: tuple[PageCopy, ...] = ()
    offload: tuple[HostCopy, ...] = ()
    restore: tuple[HostCopy, ...] = ()
    forget: tuple[str, ...] = ()  # keys of host copies that nobody will ask for
    by_grammar: bool = False  # a row samples by a grammar: the next step's masks follow from the tokens of this one

    @property
    def is_empty(self) -> bool:
        """True when nothing has to reach the device."""
        return not (
            (self.evict or self.admit or self.pages or self.prefill or self.decode)
            or (self.copies or self.offload or self.restore or self.forget)
        )

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step; of the first one when there are several."""
        return sum(len(chunk.token_ids) for chunk in self.prefill) + len(self.decode)


@dataclass(kw_only=True, slots=True)
class Sampled:
    """Tokens one slot produced in one step; `bad`: infinity or NaN in the logits of the last of them (the request fails, alone,
    unless it ends before that one). Never changed; not frozen, for the speed of construction."""

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    bad: str | None = None
    refused: str | None = None  # why its grammar cannot go on: the request fails, whatever was sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What came back of one Plan: a Sampled per sampling prefill chunk and per decode row, keyed by slot."""

    step_id: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)  # slot -> one per `targets` entry
