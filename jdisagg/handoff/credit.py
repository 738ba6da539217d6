"""How much may be on its way to one receiver. Credit is bytes since the start, cumulative: it grows with what has settled.

The receiver is D for what P publishes, and P for what D lends.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.config import TransferConfig
from jdisagg.handoff.messages import Grant

WINDOW_PIECES = 4  # pieces on their way per hand-off, or
WINDOW_BYTES = 16 * 2**20  # as much as this: small pieces would wait for their acknowledgements


def window_bytes_of(config: TransferConfig, bytes_per_token: int) -> int:
    """Bytes on their way per hand-off: within `transfer_buffer_bytes`, but two pieces always."""
    assert bytes_per_token > 0, f"bytes_per_token is {bytes_per_token}"
    piece_bytes = config.transfer_chunk_tokens * bytes_per_token
    wanted_bytes = max(WINDOW_PIECES * piece_bytes, WINDOW_BYTES)
    return max(2 * piece_bytes, min(wanted_bytes, config.transfer_buffer_bytes))


def most_pieces_of(config: TransferConfig, bytes_per_token: int) -> int:
    """Pieces on a device that fill `transfer_buffer_bytes`: there each takes as much as a whole chunk."""
    return -(-config.transfer_buffer_bytes // (config.transfer_chunk_tokens * bytes_per_token))


def most_arriving_of(config: TransferConfig, bytes_per_token: int) -> int:
    """The same of pieces that have arrived and wait for their engine, and one that comes. Four or more: over "jax" each may
    take as much as two while it comes, and a peer from which none does must not keep those of another from coming."""
    return max(4, most_pieces_of(config, bytes_per_token) + 1)


@dataclass(slots=True)
class Credit:
    """What one sender was granted."""

    window_bytes: int
    granted_bytes: int = 0

    def beyond(self, settled_bytes: int) -> Grant | None:
        """The grant of a window beyond what has settled; None when the sender has it already."""
        credit_bytes = settled_bytes + self.window_bytes
        if credit_bytes <= self.granted_bytes:
            return None
        self.granted_bytes = credit_bytes
        return Grant(credit_bytes=credit_bytes)
