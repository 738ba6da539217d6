"""Whether D reaches the ports that a P's transfer backends have of their own: proven before KV depends on it.

A firewall that drops packets would cost every piece a connection's whole time-out. Here it costs one connection per pairing,
made beside the hand-offs and closed at once, while KV comes over the other backends; it is tried again, soon and then more and
more seldom, since one lost packet looks like a firewall. A port that was proven and that a hand-off does not reach any more is
proven anew. Backend "jax" has a port for every receiver, which none knows before the first piece: what it does not reach, a
hand-off finds out, and those after it need not.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass

from jdisagg.api.tasks import until_set
from jdisagg.core.host_names import Address, Names
from jdisagg.handoff.identity import Identity

PROOF_TIMEOUT_S = 1.0
PATIENCE_S = 0.1  # hand-offs wait so long for a proof of the backend they would begin with
SOON_S, AGAIN_S = 1.0, 60.0  # until it is tried again: twice as long after each failure
TRY_S = 10.0  # so long after one hand-off tries again what was left out, others follow: it may wait for its prompt first


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A backend that KV cannot come over now."""

    backend: str
    endpoint: str  # "" where it has none that is known beforehand
    why: str


@dataclass(frozen=True, slots=True)
class Reached:
    """Backends that KV can come over, in order of preference, those that were tried in vain, and those still being tried."""

    backends: tuple[str, ...]
    unreachable: tuple[Unreachable, ...] = ()
    pending: tuple[str, ...] = ()


@dataclass(slots=True)
class _LeftOut:
    """A backend over which a hand-off reached nothing."""

    why: str
    until_s: float
    is_tried: bool = False  # by one hand-off, which would have failed by `until_s`


class PeerPorts:
    """Those of one P. Used on one event loop."""

    def __init__(self) -> None:
        self._proofs: dict[str, _Proof] = {}  # by endpoint
        self._endpoints: dict[str, str] = {}  # by backend, of those that have one
        self._unreached: dict[str, _LeftOut] = {}  # by backend, of the others
        self._epoch: str | None = None  # of the process they are of
        self._names = Names()

    async def reach(self, theirs: Identity, agreed: tuple[str, ...], *, begins: bool = True) -> Reached:
        """What of `agreed` can be used now, by a hand-off if one `begins`. Nothing begins over a port that is not proven; as
        a fallback it is believed until the proof has failed."""
        if theirs.epoch != self._epoch:
            self._epoch = theirs.epoch
            self._end()
            self._unreached = {}
        self._endpoints = {b.name: b.endpoint for b in theirs.backends if b.endpoint is not None}
        left_out = [name for name in agreed if self._is_left_out(name, begins=begins)]
        given_up = [Unreachable(name, "", self._unreached[name].why) for name in left_out]
        agreed = tuple(name for name in agreed if name not in left_out) or agreed
        ports = {name: self._proof(endpoint) for name, endpoint in self._endpoints.items() if name in agreed}
        if (first := ports.get(agreed[0])) is not None:
            await first.tried()
        unproven = {name for name, proof in ports.items() if proof.why is not None or (proof is first and not proof.is_reached)}
        usable = tuple(name for name in agreed if name not in unproven)
        failed = [Unreachable(name, proof.endpoint, proof.why) for name, proof in ports.items() if proof.why is not None]
        pending = tuple(name for name, proof in ports.items() if name in unproven and proof.why is None)
        return Reached(usable or agreed, (*given_up, *failed), pending)

    def unreached(self, backend: str, why: str) -> None:
        """A hand-off reached nothing over it. A port of its own is used again as soon as it accepts a connection."""
        endpoint = self._endpoints.get(backend)
        if endpoint is None:
            self._unreached[backend] = _LeftOut(why, asyncio.get_running_loop().time() + AGAIN_S)
        elif (proof := self._proofs.get(endpoint)) is None or proof.why is None:  # else that is known, and being tried
            if proof is not None:
                proof.task.cancel()
            self._proofs[endpoint] = _Proof(endpoint, self._names, why)

    def _is_left_out(self, backend: str, *, begins: bool) -> bool:
        """When its time is over one hand-off tries it again, and unless it fails the others do after a while."""
        now_s, left_out = asyncio.get_running_loop().time(), self._unreached.get(backend)
        if left_out is None:
            return False
        if left_out.until_s > now_s or not (begins or left_out.is_tried):
            return True
        if left_out.is_tried:
            del self._unreached[backend]
        else:
            left_out.is_tried, left_out.until_s = True, now_s + TRY_S
        return False

    async def close(self) -> None:
        """Stop trying."""
        self._endpoints = {}
        await asyncio.gather(*self._end(), return_exceptions=True)

    def _proof(self, endpoint: str) -> _Proof:
        if endpoint not in self._proofs:
            self._proofs[endpoint] = _Proof(endpoint, self._names)
        return self._proofs[endpoint]

    def _end(self) -> list[asyncio.Task[None]]:
        tasks = [proof.task for proof in self._proofs.values()]
        self._proofs = {}
        for task in tasks:
            task.cancel()
        return tasks


class _Proof:
    """Connections to one port until one succeeds."""

    def __init__(self, endpoint: str, names: Names, why: str | None = None) -> None:
        """`why` it failed, where that is known already."""
        self.endpoint = endpoint
        self.is_reached = False
        self.why = why  # the last attempt failed
        self._names = names
        self._tried = asyncio.Event()
        if why is not None:
            self._tried.set()
        self._patient_until_s = asyncio.get_running_loop().time() + PATIENCE_S
        self.task = asyncio.create_task(self._run())

    async def tried(self) -> None:
        """Until something is known, or the time for that is over."""
        await until_set(self._tried, self._patient_until_s - asyncio.get_running_loop().time())

    async def _run(self) -> None:
        pause_s = SOON_S
        while not self.is_reached:
            self.why = await self._attempt()
            self.is_reached = self.why is None
            self._tried.set()
            if not self.is_reached:
                await asyncio.sleep(min(pause_s, AGAIN_S))
                pause_s *= 2

    async def _attempt(self) -> str | None:
        """Why it failed, None when it did not."""
        host, _, port = self.endpoint.rpartition(":")
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                found = await asyncio.wrap_future(self._names.look_up(host.strip("[]")))
                return await _connect([address.at(int(port)) for address in found])
        except TimeoutError:
            return f"no answer within {PROOF_TIMEOUT_S:g} s"
        except (OSError, ValueError, OverflowError) as error:  # what P says need not be an address
            return str(error)


async def _connect(addresses: list[Address]) -> str | None:
    """Why none of them accepts, None when one does."""
    why = "no address"
    for address in addresses:
        try:
            with socket.socket(address.family, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                await asyncio.get_running_loop().sock_connect(probe, address.sockaddr)
                return None
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own words repeat the address
    return why
