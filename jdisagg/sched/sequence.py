"""One sequence's host state: its tokens, how far they are computed, and the pages it holds.

Token positions of a sequence at some moment (known = prompt + generated tokens the host has seen):

    0 ........... num_computed ....... num_scheduled ... known ... known + num_in_flight
    KV committed  |  KV in dispatched  |  KV missing     |  sampled on the device, not seen yet

A decoding sequence has num_scheduled == known + num_in_flight - 1: the last token's KV is written by the step that feeds it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from jdisagg.core.requests import EngineRequest, TokenLogprob
from jdisagg.sched.plan import PageTable
from jdisagg.sched.states import Status


@dataclass(slots=True, eq=False)
class Holding:
    """Pages of one sequence (KV group 0) and the prefix keys of its full pages."""

    pages: list[int] = field(default_factory=list)  # in token order
    keys: list[bytes] = field(default_factory=list)  # of the leading full pages hashed so far
    num_indexed: int = 0  # leading pages that are full or shared; whatever is filled behind them is offered to the prefix index
    num_offered: int = 0  # leading pages that were offered, by it or by who it is forked from, if there is an index
    twins: list[int] = field(default_factory=list)  # of those, ascending: another page had their tokens already
    is_private: bool = False  # it, or who it is forked from, lived when the index was reset: it offers nothing any more
    num_promised: int = 0  # pages set aside for it that it has not taken yet
    held_tokens: int = 0  # leading tokens a remote sequence found at add(); their pages are pinned from then on

    @property
    def page_table(self) -> PageTable:
        """Its pages as the device takes them."""
        return (tuple(self.pages),)


@dataclass(slots=True, eq=False)
class WaitState:
    """How a sequence without pages gets them, and how often it was passed."""

    is_remote: bool = False  # its KV is to come from a peer
    is_open: bool = True  # remote: the peer has begun, pages may be reserved
    host_tokens: int = 0  # leading tokens whose KV is kept in host memory
    num_bypassed: int = 0  # later sequences that took memory while this one lacked it
    was_preempted: bool = False  # it has given up its pages once: nobody passes it any more


@dataclass(slots=True, eq=False)
class Told:
    """What the client is told of a sequence beside its tokens."""

    cached_tokens: int | None = None  # prompt tokens found in a prefix cache; recorded once
    was_looked_up: bool = False  # counted in the statistics of the prefix cache
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    is_final: bool = False  # its last output was sent (a published sequence lives on until released)


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; owned by the scheduler. `order` sorts queues and picks victims: (rank, arrival number)."""

    request: EngineRequest
    order: tuple[float, int]
    status: Status
    target: int  # tokens whose KV must exist before the next token: computed here or fetched, then decoding starts
    stop_ids: frozenset[int]  # tokens that may end it
    holding: Holding = field(default_factory=Holding)
    num_computed: int = 0
    num_scheduled: int = 0
    num_in_flight: int = 0
    epoch: int = 0  # goes up when results in flight must be dropped: preempted or ended
    slot: int | None = None
    wait: WaitState = field(default_factory=WaitState)
    told: Told = field(default_factory=Told)
    max_tokens: int = field(init=False)
    generated: array[int] = field(init=False)  # 4 bytes a token, and nothing that the garbage collector goes through

    def __post_init__(self) -> None:
        self.generated = array("i", self.request.generated_token_ids)
        self.max_tokens = self.request.sampling.max_tokens

    @property
    def request_id(self) -> str:
        """Its request's id."""
        return self.request.request_id

    @property
    def num_known(self) -> int:
        """Prompt plus generated tokens the host has seen."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def max_len(self) -> int:
        """Prompt plus generated tokens at its longest."""
        return len(self.request.prompt_token_ids) + max(self.request.sampling.max_tokens, len(self.generated))

    @property
    def is_decoding(self) -> bool:
        """Its target is computed, in flight, or has arrived."""
        return self.num_scheduled >= self.target

    @property
    def awaits_token(self) -> bool:
        """What it may sample next follows from a token that the host has not seen."""
        return self.num_in_flight > 0 and self.request.sampling.grammar is not None

    @property
    def num_wanted(self) -> int:
        """Tokens still wanted, those in flight counted as here."""
        return self.max_tokens - len(self.generated) - self.num_in_flight

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are asked for and have not been sent: they travel with the first token."""
        return self.request.sampling.prompt_logprobs is not None and not self.generated

    def tokens(self, begin: int, end: int) -> tuple[int, ...]:
        """Known token ids [begin, end)."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[begin:end]
        tail = tuple(self.generated[max(0, begin - len(prompt)) : end - len(prompt)])
        return prompt[begin:] + tail

    def resumed_request(self) -> EngineRequest:
        """The request with every token seen so far, as another worker needs it to go on."""
        return replace(self.request, generated_token_ids=tuple(self.generated))

    def forget_computed(self) -> None:
        """KV is gone: everything known has to be computed (or fetched) again; results in flight are void."""
        self.epoch += 1
        self.num_computed = self.num_scheduled = self.num_in_flight = 0
        self.target = self.num_known
        self.told.prompt_logprobs.clear()

    def continue_from(self, num_tokens: int) -> None:
        """KV of all known tokens but the last, `num_tokens`, is in its pages: the next step decodes."""
        assert num_tokens == self.num_known - 1, f"{self.request_id}: {num_tokens} of {self.num_known} tokens have KV"
        self.target = self.num_computed = self.num_scheduled = num_tokens
