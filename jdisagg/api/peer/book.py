"""What a decode worker knows of its prefill peers, and the lines in its log when that changes. Written on the loop."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from math import inf
from typing import Any

from jdisagg.api.channels import NO_GRPC
from jdisagg.api.peer.ports import Reached
from jdisagg.core.bits import SAME_BY, are_unlike
from jdisagg.core.fleet import DRAINING, SUSPECT_S, WHERE_TO_LOOK
from jdisagg.core.speed import Speed

log = logging.getLogger(__name__)
NO_KV_S = 30.0  # as SUSPECT_S, for one whose KV did not come: each time that it is asked first costs a second
SPEED_S = 10.0  # how long what a peer said of its speed counts: it is asked every few seconds, unless a hand-off hears it
# To whom nobody else is left: longer than a router keeps a stream that lost its worker (--worker-wait-s), or each of these is
# there when the time is over, gains the token that P samples, fails again and waits again: 40 s a token.
USELESS_S = 35.0
_STATUS = re.compile(r"\bHello: ([A-Z_]+)\b")  # of gRPC
_UNREACHED = frozenset(("UNAVAILABLE", "DEADLINE_EXCEEDED"))  # others are answers
_WHERE = "look at MTU, firewalls and load between the two"
_SPEAKS = "answers, and its KV does not come"
_SILENT = "sent no KV before it went down"  # which a network may be the cause of that lets small messages through


@dataclass(slots=True)
class _Peer:
    failed_s: float | None = None
    no_kv_s: float | None = None  # its KV did not come
    no_kv: str | None = None  # why not, unless some came since
    why: str | None = None  # it cannot be used; "" = it can, None = never spoken to
    refuses: bool = False  # it is there, and does not pair with us
    told: frozenset[str] = frozenset()  # answers that the log has had since it was usable last; "" = that it is not heard
    backends: tuple[str, ...] = ()  # last agreed on
    unreachable: frozenset[tuple[str, str]] = frozenset()  # backends and endpoints, then
    bits: str = ""  # as in `jdisagg.core.bits`
    speed: tuple[Speed | None, float] = (None, -inf)  # and when it said so

    def lacked_kv(self, now_s: float, lately_s: float = NO_KV_S) -> bool:
        """Of late."""
        return self.no_kv_s is not None and now_s - self.no_kv_s < lately_s


class PeerBook:
    """By address."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def failed(self, peer: str, why: str, now_s: float, *, refuses: bool = False) -> None:
        """It cannot be used. Said when it is news: that it is not heard is found out in several ways, one after the other."""
        known, status = self._of(peer), "" if (found := _STATUS.search(why)) is None else found[1]
        answer = "" if status in _UNREACHED and NO_GRPC not in why else status
        if not known.why or refuses != known.refuses or (known.told and answer not in known.told):
            told = why.removeprefix(f"prefill peer {peer}: ")
            if known.why is None and status and not answer:
                told += f"; if it runs, look at its {WHERE_TO_LOOK}"
            log.warning("prefill peer %s %s: %s", peer, "does not pair with us" if refuses else "is down", told)
        known.told |= {answer}
        known.why, known.failed_s, known.refuses = why, now_s, refuses

    def no_kv(self, peer: str, why: str, now_s: float) -> None:
        """It answers, and what it publishes does not come. Said when it is news."""
        known = self._of(peer)
        if not known.lacked_kv(now_s):
            log.warning(
                "prefill peer %s %s (%s): others are asked first for %g s; %s",
                *(peer, _SILENT if known.why else _SPEAKS, why, NO_KV_S, _WHERE),
            )
        known.no_kv_s, known.no_kv = now_s, why

    def kv_came(self, peer: str) -> None:
        """All that one prompt needed; others are asked first all the same, as the line may crawl."""
        known = self._peers.get(peer)
        if known is not None and known.no_kv is not None:
            log.info("prefill peer %s: its KV comes again", peer)
            known.no_kv = None

    def drains(self, peer: str) -> None:
        """It is there, and refuses new hand-offs. Said when it is news."""
        known = self._of(peer)
        if known.why != DRAINING:
            log.info("prefill peer %s is draining", peer)
        known.why, known.refuses = DRAINING, False

    def answered(self, peer: str) -> None:
        """It can be used."""
        known = self._of(peer)
        if known.why:
            log.info("prefill peer %s answers again", peer)
        known.why, known.told = "", frozenset()

    def computes(self, peer: str, bits: str, ours: str) -> None:
        """The bits of both with `exact` numerics. Said when it is news that they are unlike."""
        known = self._of(peer)
        if bits != known.bits and are_unlike(ours, bits):
            log.warning(
                "prefill peer %s computes bits %s, we %s: streams that begin there go on here, but are not the same to the "
                "last bit as --numerics exact would have it; %s give the same",
                *(peer, bits, ours, SAME_BY),
            )
        known.bits = bits

    def is_unlike(self, peer: str, ours: str) -> bool:
        """Whether it computes other bits. Any thread."""
        known = self._peers.get(peer)
        return known is not None and are_unlike(ours, known.bits)

    def computes_at(self, peer: str, speed: Speed | None, said_s: float) -> None:
        """It said so then."""
        self._of(peer).speed = speed, said_s

    def speed(self, peer: str, now_s: float) -> Speed | None:
        """At which it computes prompts, if it said so of late. Any thread."""
        speed, said_s = (self._peers.get(peer) or _Peer()).speed
        return speed if now_s - said_s < SPEED_S else None

    def agreed(self, peer: str, reached: Reached) -> None:
        """What KV comes over, in order of preference, and what it does not come over. Said when it is news."""
        known, over = self._of(peer), ", else ".join(reached.backends)
        news = [port for port in reached.unreachable if (port.backend, port.endpoint) not in known.unreachable]
        for port in news:
            which = f"at {port.endpoint}" if port.endpoint else "on the free ports that it listens on"
            at = f"backend {port.backend} is not reachable {which}"
            log.warning("prefill peer %s: %s (%s); KV comes over %s", peer, at, port.why, over)
        if known.backends != reached.backends and not news:
            later = f"; {', '.join(reached.pending)} is still being tried" if reached.pending else ""
            log.info("prefill peer %s: KV comes over %s%s", peer, over, later)
        known.backends = reached.backends
        known.unreachable = frozenset((port.backend, port.endpoint) for port in reached.unreachable)

    def why(self, peer: str) -> str | None:
        """Why it cannot be used; "" = it can, None = nobody knows. Any thread."""
        known = self._peers.get(peer)
        return None if known is None else known.why

    def is_doubtful(self, peer: str, now_s: float) -> bool:
        """Whether it is there, and does not pair with us, or could not be reached a moment ago, or its KV did not come. Any
        thread."""
        known = self._peers.get(peer)
        if known is None:
            return False
        if known.lacked_kv(now_s):
            return True
        if not known.why or known.why == DRAINING:
            return False
        return known.refuses or (known.failed_s is not None and now_s - known.failed_s < SUSPECT_S)

    def whys(self) -> dict[str, str]:
        """Of all that were spoken to. Any thread."""
        return {peer: known.why for peer, known in list(self._peers.items()) if known.why is not None}

    def obstacles(self, now_s: float) -> dict[str, str]:
        """The same, and why those are of no use that can be asked, and have sent no KV of late. Any thread."""
        whys = self.whys()
        for peer, known in list(self._peers.items()):
            if whys.get(peer) == "" and known.no_kv is not None and known.lacked_kv(now_s, USELESS_S):
                whys[peer] = f"it {_SPEAKS} ({known.no_kv}); {_WHERE}"
        return whys

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """JSON-able: what KV comes over, and why it does not. Any thread."""
        known = list(self._peers.items())
        return {
            peer: {"backends": list(one.backends), "why_not": one.why, "bits": one.bits}
            for peer, one in known
            if one.why is not None
        }

    def known(self) -> list[str]:
        """Peers of which it has anything, those never spoken to as well."""
        return list(self._peers)

    def forget(self, peer: str) -> None:
        """As if it had never been there."""
        self._peers.pop(peer, None)

    def _of(self, peer: str) -> _Peer:
        return self._peers.setdefault(peer, _Peer())
