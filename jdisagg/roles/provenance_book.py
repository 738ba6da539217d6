"""Where the KV of a decode worker's requests came from, kept until their last output says it. The next one after KV arrived
says it, too: who ends an answer there, at a stop string, hears no last one."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.requests import Output, Provenance

_COUNTS = (
    "prefilled_tokens",
    "transferred_tokens",
    "transferred_pages",
    "transferred_bytes",
    "borrowed_tokens",
    "borrowed_bytes",
)


class ProvenanceBook:
    """By request id, from the end of the hand-off to the end of the request. Owned by the engine thread."""

    def __init__(self, page_size: int) -> None:
        """`page_size`: tokens in a page here, for the number of pages that were filled."""
        self._page_size = page_size
        self._of: dict[str, Provenance] = {}
        self._untold: set[str] = set()  # of whom no output has said it yet

    def arrived(self, request_id: str, provenance: Provenance) -> None:
        """What was transferred, as far as it was not here; all of it, or until nobody was left to ask. What an earlier hand-off
        of the request brought counts, too: its pages were lost, and it was fetched again."""
        pages = -(-provenance.transferred_tokens // self._page_size)
        self._untold.add(request_id)
        earlier, now = self._of.get(request_id, Provenance()), replace(provenance, transferred_pages=pages)
        self._of[request_id] = Provenance(
            prefill_worker=now.prefill_worker or earlier.prefill_worker,
            recoveries=earlier.recoveries + now.recoveries,
            **{name: getattr(earlier, name) + getattr(now, name) for name in _COUNTS},
        )

    def ended(self, output: Output) -> Output:
        """An output of a hand-off. Where it is the last one, what an earlier hand-off of its request brought counts, too."""
        if output.finish is None or output.request_id not in self._of:
            return output
        self.arrived(output.request_id, output.provenance or Provenance())
        return self.signed(output)

    def forget(self, request_id: str) -> None:
        """The request is over; idempotent."""
        self._of.pop(request_id, None)
        self._untold.discard(request_id)

    def signed(self, output: Output) -> Output:
        """The output, and what is known of its request when it is the last one, or the first since KV arrived."""
        provenance = self._of.get(output.request_id)
        if provenance is None or (output.finish is None and output.request_id not in self._untold):
            return output
        self._untold.discard(output.request_id)
        computed_here = output.provenance.prefilled_tokens if output.provenance is not None else 0
        prefilled_tokens = provenance.prefilled_tokens or computed_here
        return replace(output, provenance=replace(provenance, prefilled_tokens=prefilled_tokens))
