"""Where one request is, by /debug/state of the processes that may have it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from chaos_kit.fleet import Fleet
from chaos_kit.member import Member

Part = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker that knows the request: its entry in the scheduler and in the ledger of hand-offs."""

    member: Member
    sequence: Part
    handoff: Part

    def text(self) -> str:
        """In a few words."""
        sequence, handoff = self.sequence, self.handoff
        done = f"{sequence.get('computed_tokens')}/{sequence.get('prompt_tokens')}+{sequence.get('generated_tokens')}"
        pieces = handoff.get("pieces", handoff.get("pieces_on_the_way", 0))
        return (
            f"{self.member.name}: {sequence.get('status', '-')} {done}, hand-off {handoff.get('stage', '-')}, {pieces} pieces"
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """One look around. None: unknown there, or nobody was asked."""

    flight: Part | None = None
    prefill: Place | None = None
    decode: Place | None = None

    def text(self) -> str:
        """In a few words."""
        parts = [f"router: at {self.flight['worker']}, {self.flight['delivered']} delivered"] if self.flight else []
        return "; ".join(parts + [place.text() for place in (self.prefill, self.decode) if place is not None])


class Lookout:
    """Looks for one request; remembers the workers it was seen at."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.seen_prefill: Member | None = None
        self.seen_decode: Member | None = None
        self._fleet = fleet
        self._name = name

    async def look(self) -> View:
        """Ask everybody who can answer, together."""
        fleet = self._fleet
        router, prefill, decode = await asyncio.gather(
            _state(fleet.routers[0]), self._find(fleet.prefill), self._find(fleet.decode)
        )
        flight = next((one for one in router.get("flights", ()) if self._is_mine(one["request_id"])), None)
        self.seen_prefill = prefill.member if prefill is not None else self.seen_prefill
        self.seen_decode = decode.member if decode is not None else self.seen_decode
        return View(flight=flight, prefill=prefill, decode=decode)

    async def _find(self, members: list[Member]) -> Place | None:
        states = await asyncio.gather(*(_state(member) for member in members))
        for member, state in zip(members, states, strict=True):
            sequences = (state.get("scheduler") or {}).get("sequences", ())
            handoffs = (state.get("handoff") or {}).get("handoffs", {})
            sequence = next((one for one in sequences if self._is_mine(one["request_id"])), {})
            handoff = next((one for name, one in handoffs.items() if self._is_mine(name)), {})
            if sequence or handoff:
                return Place(member=member, sequence=sequence, handoff=handoff)
        return None

    def _is_mine(self, request_id: str) -> bool:
        return request_id.startswith(f"{self._name}/")


async def _state(member: Member) -> Part:
    if not member.up or member.frozen:
        return {}
    try:
        return await member.state()
    except (httpx.HTTPError, ValueError):  # struck meanwhile
        return {}
