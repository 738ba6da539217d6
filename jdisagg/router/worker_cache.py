"""What the prefix cache of one worker still has of the prompts that it was sent, as far as can be known from here.

    written:   .....[ prompt A ].............[ prompt B ]......|
                        |<-------- num_tokens ---------------->|    of A the beginning is left, and all of B

A cache forgets the least recently used first, of a prompt the end first; what a prompt had cached already is written by nobody.
The worker says how large its cache is, and with each first token what it found there.

What is used again pushes others back as well, and is not counted, so that a little too much is thought to be left. Counted,
it was right more often, and less was cached: 89 % instead of 92 % of twelve templates that just fit into two small real
caches. What is thought gone is computed by whoever has least to do; what is thought to be where it was is there again, once,
afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from jdisagg.core.fleet import Key

PAGE_TOKENS = 1024  # of the largest page: fewer that are missing tell nothing
LOST_WEIGHT = 2  # prompt tokens that were lost are written again; and somebody wrote, unknown to us, what they were lost to


@dataclass(eq=False, slots=True, weakref_slot=True)
class WorkerCache:
    """One object for each process, as every prompt that it had remembers it."""

    key: Key
    num_tokens: int = 0  # that it holds; 0: the worker does not say
    written: int = 0  # prompt tokens so far that were not in it

    def left(self, written: int) -> float:
        """How many leading tokens are left of a prompt behind which so many were written in all; it may have had fewer."""
        return self.num_tokens - (self.written - written) if self.num_tokens else inf

    def tell(self, num_thought: int, num_found: int) -> bool:
        """Of a prompt it had so many tokens, where we thought so many; whether that was too little."""
        if (num_lost := num_thought - num_found) < PAGE_TOKENS:
            return False
        self.written += LOST_WEIGHT * num_lost
        return True
