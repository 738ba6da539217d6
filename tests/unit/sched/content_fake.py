"""A model a reader computes by hand, and KV pages that know what they hold: which token, where, behind which other tokens.

The next token is the sum of all tokens read back through the page table, modulo VOCAB. KV of a token is a function of all
tokens up to it, so `Cell`s are equal exactly when a real page would hold the same numbers. Reading anything but what is wanted
raises and says what was there instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from jdisagg.sched.plan import PageCopy

VOCAB = 31
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """The whole model."""
    return sum(tokens) % VOCAB


class Cell(NamedTuple):
    """KV of one token of one sequence."""

    token: int
    position: int
    before: int  # hash of all tokens before it, and of the tenant

    def next(self, token: int) -> Cell:
        """KV of the token that follows."""
        return Cell(token, self.position + 1, hash((self.before, self.token)))


def chain(tokens: Sequence[int], salt: str = "") -> list[Cell]:
    """KV of a whole sequence. Tenants (by cache salt) never see each other's, though their numbers would be equal."""
    cells: list[Cell] = []
    for token in tokens:
        cells.append(cells[-1].next(token) if cells else Cell(token, 0, hash(salt)))
    return cells


class FakePages:
    """The pool. Page 0 is the null page: nothing may be kept there."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.cells: list[list[Cell | None]] = [[None] * page_size for _ in range(num_pages)]

    def write(self, pages: Sequence[int], cell: Cell) -> int:
        """Store one cell where `pages` has its position; returns the page."""
        assert cell.position < len(pages) * self.page_size, f"{cell} is written past a table of {len(pages)} pages"
        page = pages[cell.position // self.page_size]
        assert page != 0, f"the null page got {cell}"
        self.cells[page][cell.position % self.page_size] = cell
        return page

    def expect(self, pages: Sequence[int], wanted: Sequence[Cell], length: int) -> None:
        """Assert that positions [0, length) hold `wanted`."""
        size = self.page_size
        assert length <= len(pages) * size, f"{length} tokens are read through a table of {len(pages)} pages"
        for number, begin in enumerate(range(0, length, size)):
            end = min(begin + size, length)
            got = self.cells[pages[number]]
            if (got if end - begin == size else got[: end - begin]) != wanted[begin:end]:
                raise AssertionError(self._difference(pages[number], got, wanted[begin:end]))

    def blank(self, pages: Iterable[int]) -> None:
        """Nobody may count on what these pages hold. A real pool keeps it: often just what is wanted, and no error is seen."""
        for page in pages:
            self.cells[page] = [None] * self.page_size

    def take(self, pages: Sequence[int], length: int) -> list[Cell]:
        """Cells of [0, length), which must be of one sequence; whose, the reader finds out."""
        cells = [self.cells[pages[i // self.page_size]][i % self.page_size] for i in range(length)]
        written = [cell for cell in cells if cell is not None]
        assert len(written) == length, f"KV is read that nobody wrote: {length - len(written)} of {length} tokens"
        for last, cell in pairwise(written):
            assert cell == last.next(cell.token), f"KV of two sequences is read as one: {cell} behind {last}"
        assert not written or written[0].position == 0, f"KV of position 0 is of {written[0]}"
        return written

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """All at once, as a device does: none may depend on another."""
        targets = {copy.target for copy in copies}
        assert len(targets) == len(copies), "two pages are copied to one"
        assert 0 not in targets, "a page is copied to the null page"
        assert not targets & {copy.source for copy in copies}, "a page is copied from and to in one step"
        for copy in copies:
            self.cells[copy.target] = list(self.cells[copy.source])

    @staticmethod
    def _difference(page: int, got: Sequence[Cell | None], wanted: Sequence[Cell]) -> str:
        if None in got[: len(wanted)]:
            return f"KV is read that nobody wrote: page {page} holds {got}, wanted {wanted}"
        return f"foreign or stale KV is read: page {page} holds {got}, wanted {wanted}"
