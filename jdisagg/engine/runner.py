"""`ModelRunner`: the device side of one engine. Plans go in, tokens come out, one step late if the caller likes.

dispatch(plan): forget -> page copies -> offload -> evict -> admit -> page appends -> restore -> masks of grammars
                -> prefill steps -> decode steps
collect(handle): one read of what those steps sampled
export_tokens / import_tokens: KV of a token range as a piece [L, T, K, F], which knows no pages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdisagg.engine import host_copies, updates
from jdisagg.engine.buckets import PrefillBucket
from jdisagg.engine.device import Device
from jdisagg.engine.grammar_rows import GrammarRows, Grammars, Place, advance
from jdisagg.engine.packing import Packed, pack_exact, pack_prefill
from jdisagg.engine.results import Part, read
from jdisagg.engine.state import words_of
from jdisagg.engine.steps import StepOut
from jdisagg.engine.token_index import spans, token_index
from jdisagg.kv.group import KVGroup
from jdisagg.sched.plan import Admit, HostCopy, PageCopy, PageTable, Plan, StepResult
from jdisagg.transfer.base import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerShape:
    """Which executables this runner uses; `exact` uses neither bucket list."""

    prefill: tuple[PrefillBucket, ...]
    decode: tuple[int, ...]
    exact: bool
    max_model_len: int  # tokens one sequence may have


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step in flight."""

    step_id: int
    parts: tuple[Part, ...]
    places: Mapping[int, Place]  # of the slots that sample by a grammar, which may be others' before this is collected


class ModelRunner:
    """Implements `jdisagg.roles.ports.Runner`; called by one thread."""

    def __init__(self, device: Device, shape: RunnerShape, grammars: Grammars | None = None) -> None:
        """`grammars`: of the model's tokenizer; None refuses requests that have one."""
        self.device = device
        self.shape = shape
        self._grammar_rows = GrammarRows(grammars, 4 * words_of(device.shape.vocab_size))
        self._host = host_copies.HostCopies(device.shape.chunk_tokens)
        self._num_top: dict[int, int] = {}  # slot -> alternatives wanted, for slots that want log-probabilities

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self.device.pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.device.layout.page_size

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a piece, padding included."""
        return self.device.shape.chunk_tokens

    @property
    def max_model_len(self) -> int:
        """Tokens one sequence may have."""
        return self.shape.max_model_len

    def dispatch(self, plan: Plan) -> Dispatched:
        """Start one step without waiting for it; only KV on its way to the host or back may be waited for, see HostCopies."""
        for key in plan.forget:
            self._host.forget(key)
        self._copy_pages(plan.copies)
        for copy in plan.offload:
            self._offload(copy)
        for slot in plan.evict:
            self._num_top.pop(slot, None)
            self._grammar_rows.evict(slot)
        self._admit(plan.admit)
        for entries in updates.pack_appends(plan.pages, num_slots=self.device.shape.max_num_seqs):
            self.device.update("append", entries)
        self._restore(plan.restore)
        places = self._allow(plan)
        parts = self._exact(plan) if self.shape.exact else [*self._prefill(plan), *self._decode(plan)]
        for part in parts:
            for array in jax.tree.leaves(part.wanted()):
                array.copy_to_host_async()
        return Dispatched(plan.step_id, tuple(parts), places)

    def is_done(self, handle: Dispatched) -> bool:
        """Whether the device is through with a dispatched step."""
        arrays: list[Any] = jax.tree.leaves([part.ends_with() for part in handle.parts])  # jax.Array's stub lacks is_ready
        return all(array.is_ready() for array in arrays)

    def collect(self, handle: Dispatched) -> StepResult:
        """Wait for a dispatched step and read its tokens."""
        sampled, prompts = read(handle.parts, handle.step_id)
        self._host.settle()
        if handle.places:
            sampled = advance(handle.places, sampled)
        return StepResult(step_id=handle.step_id, sampled=sampled, prompt_logprobs=prompts)

    def export_tokens(self, page_table: PageTable, begin: int, end: int) -> Piece:
        """Gather KV of tokens [begin, end), at most `chunk_tokens`, into fresh arrays, ordered after dispatched steps."""
        rows = self.device.export(self._where(page_table[0], begin, end))
        return Piece(begin=begin, end=end, data=rows.data, scales=rows.scales)

    def import_tokens(self, page_table: PageTable, piece: Piece) -> None:
        """Scatter a confirmed piece into the pages of `page_table`, ordered before every later step."""
        wanted, got = self.device.shape.chunk_tokens, piece.data.shape[1]
        assert got == wanted, f"a piece of {got} tokens, wanted {wanted}: pad it to --transfer-chunk-tokens before import"
        rows = KVGroup(piece.data, piece.scales)
        self.device.import_piece(rows, self._where(page_table[piece.group], piece.begin, piece.end))

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages, as many tokens at a time as a piece holds."""
        sources, targets = tuple(copy.source for copy in copies), tuple(copy.target for copy in copies)
        for begin, end in spans(len(copies) * self.page_size, self.chunk_tokens):
            rows = self.device.export(self._where(sources, begin, end))
            self.device.import_piece(rows, self._where(targets, begin, end))

    def _offload(self, copy: HostCopy) -> None:
        ranges = spans(copy.num_tokens, self.chunk_tokens)
        pieces = (self.device.export(self._where(copy.page_table[0], *one)) for one in ranges)
        self._host.keep(copy.key, pieces, copy.num_tokens)

    def _restore(self, copies: Sequence[HostCopy]) -> None:
        """A piece lies on the device beside its pages until it is in them, which is behind the step that runs."""
        num_bytes = 0
        for copy in copies:
            ranges = spans(copy.num_tokens, self.chunk_tokens)
            for (begin, end), piece in zip(ranges, self._host.take(copy.key), strict=True):
                num_bytes += host_copies.bytes_of(piece)
                if num_bytes > host_copies.MOST_BYTES:
                    self.device.wait_for_pages()
                    num_bytes = host_copies.bytes_of(piece)
                on_device = jax.device_put(piece, self.device.piece_sharding)
                self.device.import_piece(on_device, self._where(copy.page_table[0], begin, end))

    def _where(self, pages: Sequence[int], begin: int, end: int) -> np.ndarray:
        return token_index(pages, begin, end, page_size=self.page_size, width=self.chunk_tokens)

    def _admit(self, admits: Sequence[Admit]) -> None:
        shape = self.device.shape
        sizes = {"num_slots": shape.max_num_seqs, "vocab_size": shape.vocab_size}
        for rows in updates.pack_admissions(admits, width=shape.pages_per_seq, **sizes):
            self.device.update("admit", rows)
        for admit in admits:
            self._num_top.pop(admit.slot, None)
            self._grammar_rows.admit(admit)
            if admit.sampling.logprobs is not None:
                self._num_top[admit.slot] = admit.sampling.logprobs
            if updates.is_shaped(admit.sampling):
                for entries, bias in updates.pack_history(admit, **sizes):
                    self.device.update("history", entries, bias)

    def _allow(self, plan: Plan) -> dict[int, Place]:
        shape, places = self.device.shape, self._grammar_rows.sampling(plan)
        masks = self._grammar_rows.masks(places)
        for slots, words in updates.pack_masks(masks, num_slots=shape.max_num_seqs, vocab_size=shape.vocab_size):
            self.device.update("allow", slots, words)
        return places

    def _prefill(self, plan: Plan) -> list[Part]:
        packed = pack_prefill(plan.prefill, self.shape.prefill, self.device.shape.max_num_seqs)
        return [self._part(step, self._prefilled(step)) for step in packed]

    def _prefilled(self, step: Packed) -> StepOut:
        """Hidden rows go with this: nobody reads them but `score`."""
        out = self.device.prefill(step.batch)
        return StepOut(out.sampling, tuple(self.device.score(out.hidden, wanted) for wanted in step.to_score))

    def _decode(self, plan: Plan) -> list[Part]:
        if not plan.decode:
            return []
        smallest = next(bucket for bucket in self.shape.decode if bucket >= len(plan.decode))  # the largest holds all slots
        rows = np.full(smallest, self.device.shape.max_num_seqs, np.int32)
        rows[: len(plan.decode)] = plan.decode
        step = Packed(rows, tuple(enumerate(plan.decode)))
        return [self._part(step, self.device.decode(rows)) for _ in range(plan.num_steps)]

    def _exact(self, plan: Plan) -> list[Part]:
        """Several steps need nothing new from the host: a decode row finds its token and position in the device's state."""
        assert plan.num_steps == 1 or not plan.prefill, f"step {plan.step_id}: prompts are computed once"
        packed = list(pack_exact(plan.prefill, plan.decode, self.device.shape.max_num_seqs))
        return [self._part(step, self.device.exact(step.batch)) for _ in range(plan.num_steps) for step in packed]

    def _part(self, packed: Packed, out: StepOut) -> Part:
        num_top = {slot: self._num_top[slot] for _, slot in packed.samples if slot in self._num_top}
        return Part(packed, out, num_top)
