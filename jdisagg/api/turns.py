"""What came at once goes on a few at a time: between them the event loop does all else, heartbeats above all.

A loop runs everything that is ready before it looks at its clock. A thousand requests that arrive together, a millisecond of
work each, would keep it from its heartbeats for a second, and others would take this process for dead.

grpc.aio is woken by a byte for each event, in a socket of its own, and takes one byte in each round of the loop
(`_handle_events` of its PollerCompletionQueue). Where rounds are long and each brings two events, some hundred bytes fill the
socket; from then on events, heartbeats among them, come one in a round, later and later. So there are rounds without work.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 4  # each takes up to some milliseconds: a tokenizer reads 16,384 characters, a stream is opened
ROUNDS = 16  # of the loop to a turn; one in which nothing happens takes some microseconds


class Turns:
    """`await wait()` before such work, without another `await` between. Those who wait go on in the order in which they came.
    Use from one event loop."""

    def __init__(self) -> None:
        self._num_left = PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_rounds = 0  # until the next turn; 0 = nobody needs one

    async def wait(self) -> None:
        """Returns at once while fewer than PER_TURN went on in this turn."""
        if self._num_left and not self._waiting:
            self._num_left -= 1
            self._call_soon()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._call_soon()
        await turn

    def _call_soon(self) -> None:
        if not self._num_rounds:
            self._num_rounds = ROUNDS
            asyncio.get_running_loop().call_soon(self._go_round)

    def _go_round(self) -> None:
        self._num_rounds -= 1
        if self._num_rounds:
            asyncio.get_running_loop().call_soon(self._go_round)
        else:
            self._begin()

    def _begin(self) -> None:
        """The next turn: who is called now runs behind this one."""
        self._num_left = PER_TURN
        while self._num_left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._num_left -= 1
        if self._num_left < PER_TURN:
            self._call_soon()
