"""When those who are refused are told to come again: one after the other, so that they do not all come back at once."""

from __future__ import annotations

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


class Bookings:
    """Places that are promised. The clock is the caller's."""

    def __init__(self) -> None:
        self._booked_s = 0.0  # places that come free until then are promised

    def retry_after_s(self, now_s: float, free_s: float, seconds_per_place: float, num_asked: int) -> float:
        """Promise the next place after those promised so far, of which none comes free before `free_s`; returns how long until
        it does, within MIN_RETRY_S and MAX_RETRY_S. Who is refused by `num_asked` workers comes back to one of them: if each
        kept a whole place for it, eight of them would send everybody away for eight times too long."""
        earliest_s = max(self._booked_s, free_s) + seconds_per_place / num_asked
        retry_after_s = min(max(earliest_s - now_s, MIN_RETRY_S), MAX_RETRY_S)
        self._booked_s = now_s + retry_after_s
        return retry_after_s
