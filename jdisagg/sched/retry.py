"""When those who are refused are told to come again: one after the other, so that they do not all come back at once."""

from __future__ import annotations

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
_GOLDEN = 0.6180339887  # its multiples, without their whole parts, fill an interval evenly, however many there are


class RetryTimes:
    """Places that are promised. The clock is the caller's."""

    def __init__(self) -> None:
        self._booked_s = 0.0  # places that come free until then are promised
        self._num_beyond = 0  # that no place was promised

    def retry_after_s(self, now_s: float, free_s: float, seconds_per_place: float, num_asked: int) -> float:
        """Promise the next place after those promised so far, of which none comes free before `free_s`; returns how long until
        it does, within MIN_RETRY_S and MAX_RETRY_S. Who is refused by `num_asked` workers comes back to one of them: if each
        kept a whole place for it, eight of them would send everybody away for eight times too long. Beyond MAX_RETRY_S none
        is promised: those come spread over the later half of that time, not all at once as they may have come before."""
        earliest_s = max(self._booked_s, free_s) + seconds_per_place / num_asked
        if earliest_s - now_s > MAX_RETRY_S:
            self._num_beyond += 1
            return MAX_RETRY_S * (1 - self._num_beyond * _GOLDEN % 1 / 2)
        self._booked_s = max(earliest_s, now_s + MIN_RETRY_S)
        return self._booked_s - now_s
