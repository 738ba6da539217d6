"""KV that left the device: whose, and how much."""

from __future__ import annotations

from jdisagg.sched.sequence import Sequence


class HostMemory:
    """How much KV is on the host, whose `WaitState.host_tokens` says; the bytes are the runner's."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self._forgotten: list[str] = []

    def keep(self, sequence: Sequence, num_tokens: int) -> bool:
        """Set room aside for a copy; False when there is nothing to keep or it does not fit, and nothing changes."""
        if not 0 < num_tokens <= self.capacity_tokens - self.used_tokens:
            return False
        assert not sequence.wait.host_tokens, f"{sequence.request_id} has a host copy already"
        sequence.wait.host_tokens = num_tokens
        self.used_tokens += num_tokens
        return True

    def restored(self, sequence: Sequence) -> None:
        """The copy goes back to the device with the plan in the making, which removes it from the host."""
        self.used_tokens -= sequence.wait.host_tokens
        sequence.wait.host_tokens = 0

    def drop(self, sequence: Sequence) -> None:
        """Nobody will ask for the copy, if there is one; the next plan says so."""
        if sequence.wait.host_tokens:
            self.restored(sequence)
            self._forgotten.append(sequence.request_id)

    @property
    def has_forgotten(self) -> bool:
        """Copies were dropped since the last `take_forgotten`."""
        return bool(self._forgotten)

    def take_forgotten(self) -> tuple[str, ...]:
        """Copies dropped since the last call."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten
