"""A worker's registration with its routers: register, heartbeat, register again whenever a router does not know us.

A name with several addresses is several routers (`router_names`): where one joins them this worker registers there, too, and a
router that is no longer among them is let go once it does not answer and another one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

import grpc
import grpc.aio
from prometheus_client import Gauge

from jdisagg.api.channels import INSECURE, NO_GRPC, Credentials, open_channel, speaks_no_grpc
from jdisagg.api.fleet.codec import encode_member, encode_report
from jdisagg.api.fleet.router_names import LOOK_S, LOOK_SOON_S, RouterNames
from jdisagg.api.tasks import AFTER_BUG_S, cancel_and_wait, start_in, until_set
from jdisagg.core.config import TransferConfig
from jdisagg.core.fleet import WHERE_TO_LOOK, Member, Report
from jdisagg.core.told import told
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 1.0
RETRY_S = 0.25
UNHEARD_S = 5.0  # until a router that never answered is told of: it may be starting as well
REFUSED_S = 30.0  # a router that would not have us, and has not answered for so long, may be gone for good
NO_ROUTER = "what answers there is none; give --router the --grpc-port of a router"
_NOT_TAKEN = {  # what says so, and how loud
    grpc.StatusCode.ALREADY_EXISTS: logging.WARNING,  # it passes
    grpc.StatusCode.FAILED_PRECONDITION: logging.ERROR,
    grpc.StatusCode.UNIMPLEMENTED: logging.ERROR,  # another process of a fleet, or of somebody else
}


@dataclass(slots=True)
class _Router:
    """One that is kept: whether it knows us, and what the log has had of it since it did."""

    is_registered: bool = False
    is_leaving: bool = False  # it said goodbye: its end is no outage
    is_refusal_told: bool = False  # it does not take our API key
    not_taken: grpc.StatusCode | None = None  # told: another process has our address, or it is another model's
    refusal: str = ""  # its word that it will not have us, which does not pass by itself ..
    refused_s: float = 0.0  # .. and when it said so last
    is_reached: bool = True  # as far as it says
    unheard_s: float | None = None  # never registered with, and since when; None once that is told


class FleetClient:
    """Keeps one worker registered with every router given, and with every one that a name given stands for. Lives on one event
    loop."""

    def __init__(
        self,
        member: Member,
        routers: tuple[str, ...],
        *,
        state: Callable[[], Report],
        on_prefill: Callable[[str, tuple[str, ...]], None] = lambda router, peers: None,
        credentials: Credentials = INSECURE,
        config: TransferConfig = TransferConfig(),
    ) -> None:
        """`state` is asked at every heartbeat and must not block. `on_prefill` hears after each which prefill workers that
        router has for it, which decode workers alone use. `config` is compared with the router's: who beats more slowly than
        the other waits is taken for dead again and again."""
        self._member = member
        self._config = config
        self._state = state
        self._on_prefill = on_prefill
        self._credentials = credentials
        self._routers: dict[str, _Router] = {}  # that are kept
        self._typed = routers
        self._names = RouterNames(routers)
        self._failed = asyncio.Event()  # some router does not answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep_wanted()
        start_in(self._tasks, self._follow_names())

    def registered(self) -> dict[str, bool]:
        """Routers, and whether each knows us as far as we know."""
        return {router: known.is_registered for router, known in self._routers.items()}

    def refusal(self) -> str:
        """Why no router has this worker, and none will until somebody changes something; else empty."""
        since_s = monotonic() - REFUSED_S
        wanted = {router: known for router, known in self._routers.items() if router in self._names.wanted}
        told = [(router, known.refusal) for router, known in wanted.items() if known.refusal and known.refused_s >= since_s]
        return f"router {told[0][0]} does not take this worker: {told[0][1]}" if told and len(told) == len(wanted) else ""

    def show_in(self, gauge: Gauge) -> None:
        """Have `jdisagg_routers` say how many know us, and how many do not, at every scrape."""
        for state, known in (("registered", True), ("not_registered", False)):
            gauge.labels(state=state).set_function(partial(self._count, known))

    def _count(self, known: bool) -> int:
        return sum(is_registered is known for is_registered in self.registered().values())

    async def announce(self) -> None:
        """Heartbeat at once: routers that do not end themselves learn that we drain before we refuse their next request. Takes
        RPC_TIMEOUT_S at most."""
        told = [router for router, known in self._routers.items() if known.is_registered and not known.is_leaving]
        await asyncio.gather(*(self._announce(router) for router in told))

    async def _announce(self, router: str) -> None:
        channel = open_channel(router, self._credentials)
        try:
            await self._heartbeat(router, fleet_pb2_grpc.FleetServiceStub(channel))
        except grpc.aio.AioRpcError as error:
            log.info("router %s could not be told that this worker drains (%s)", router, error.code().name)
        except Exception:  # it drains all the same
            log.exception("router %s could not be told that this worker drains", router)
        finally:
            await channel.close()

    async def close(self) -> None:
        """Stop; routers evict us after missed heartbeats."""
        await cancel_and_wait(*self._tasks)

    async def _follow_names(self) -> None:
        """Keep every router that a name stands for, for ever."""
        while True:
            try:
                await self._names.look()
                self._keep_wanted()
            except Exception:  # a bug of ours: routers that are known are kept
                log.exception("the names of --router could not be looked up")
            await asyncio.sleep(LOOK_SOON_S)
            await until_set(self._failed, LOOK_S - LOOK_SOON_S)
            self._failed.clear()

    def _keep_wanted(self) -> None:
        for router in self._names.wanted:
            if router not in self._routers:
                self._routers[router] = _Router(unheard_s=monotonic())
                start_in(self._tasks, self._keep(router))

    def _is_superseded(self, router: str) -> bool:
        """Whether its name stands for others by now, and one of those has us."""
        wanted = self._names.wanted
        return router not in wanted and any(self.registered().get(other) for other in wanted)

    async def _keep(self, router: str) -> None:
        """Serve one router while it is wanted. A failed connection is replaced by a new one, which connects at once."""
        while not self._is_superseded(router):
            try:
                await self._keep_until_it_fails(router)
                self._failed.set()
                await asyncio.sleep(RETRY_S)
            except Exception:  # a bug of ours or of grpc: without heartbeats this worker would be evicted, and nobody told
                log.exception("the registration with router %s failed; registering again", router)
                await asyncio.sleep(AFTER_BUG_S)
        others = ", ".join(other for other, is_registered in self.registered().items() if is_registered)
        log.info("router %s is let go; registered with %s", router, others)
        del self._routers[router]
        self._on_prefill(router, ())

    async def _keep_until_it_fails(self, router: str) -> None:
        channel = open_channel(router, self._credentials)
        try:
            await self._serve(router, fleet_pb2_grpc.FleetServiceStub(channel))
        except grpc.aio.AioRpcError as error:
            self._say(router, error)
        finally:
            self._routers[router].is_registered = False
            await channel.close()

    def _say(self, router: str, error: grpc.aio.AioRpcError) -> None:
        """Why an RPC failed, when it is news."""
        code, why, draining = error.code(), told(error.details() or ""), self._state().draining
        known = self._routers[router]
        if router not in self._names.wanted and not known.is_registered:
            return  # a name: each of its addresses says the same
        why, level = NO_ROUTER if code is grpc.StatusCode.UNIMPLEMENTED else why, _NOT_TAKEN.get(code)
        if speaks_no_grpc(error):
            why, level = f"it {NO_GRPC}", logging.ERROR
        if code is grpc.StatusCode.UNAUTHENTICATED or level == logging.ERROR:
            known.refusal, known.refused_s = why, monotonic()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            if not known.is_refusal_told:
                known.is_refusal_told = True
                log.error("router %s refuses this worker: %s", router, why)
        elif draining:
            return
        elif level is not None:
            if known.not_taken is not code:
                known.not_taken = code
                log.log(level, "router %s does not take this worker: %s; registering until it does", router, why)
        elif known.is_registered and known.is_leaving:
            log.info("router %s has stopped, as it said; registering again when it is back", router)
        elif known.is_registered:
            log.warning("router %s does not answer (%s); registering again until it does", router, code.name)
        elif known.unheard_s is not None and monotonic() - known.unheard_s > UNHEARD_S:
            known.unheard_s = None
            heard = (router, UNHEARD_S, code.name, why)
            log.warning("router %s has not answered for %.0f s (%s: %s); registering until it does", *heard)

    def _say_whether_reached(self, router: str, why: str) -> None:
        """`why` not, by the router's own word: our heartbeats reach it all the same, so that nothing here would show it."""
        known = self._routers.get(router)
        if known is None or known.is_reached == (not why):
            return
        known.is_reached = not why
        if why:
            look = "its API key and this worker's" if why.startswith(grpc.StatusCode.UNAUTHENTICATED.name) else WHERE_TO_LOOK
            where = (router, self._member.address, why, look)
            log.warning("router %s does not reach this worker at %s: %s; look at %s", *where)
        else:
            log.info("router %s reaches this worker", router)

    async def _serve(self, router: str, stub: fleet_pb2_grpc.FleetServiceStub) -> None:
        """Register, then heartbeat until an RPC fails; NOT_FOUND means register again on the same connection."""
        while True:
            request = fleet_pb2.RegisterRequest(member=encode_member(self._member.reporting(self._state())))
            answer: fleet_pb2.RegisterResponse = await stub.Register(request, timeout=RPC_TIMEOUT_S)
            self._routers[router] = _Router(is_registered=True)
            log.info("registered with router %s as %s", router, self._member.address)
            self._compare(router, answer.heartbeat_ms / 1000, answer.dead_after_ms / 1000)
            interval_s = max(answer.heartbeat_ms, 10) / 1000
            while await self._heartbeat(router, stub):
                if router in self._typed and self._is_superseded(router):
                    return  # a name, one of whose routers answered; each of them is kept by now
                await asyncio.sleep(interval_s)

    def _compare(self, router: str, heartbeat_s: float, dead_after_s: float) -> None:
        """Say so when one side beats too slowly for the other; `heartbeat_s` and `dead_after_s` are the router's."""
        for slow, beat_s, quick, limit_s in (
            (f"router {router}", heartbeat_s, "this worker", self._config.dead_after_s),
            ("this worker", self._config.heartbeat_s, f"router {router}", dead_after_s),
        ):
            if 2 * beat_s > limit_s:
                words = (
                    "%s has --heartbeat-s %g and %s --dead-after-s %g: it will be taken for dead; give both the same settings"
                )
                log.warning(words, slow, beat_s, quick, limit_s)

    async def _heartbeat(self, router: str, stub: fleet_pb2_grpc.FleetServiceStub) -> bool:
        request = encode_report(self._member, self._state())
        try:
            answer: fleet_pb2.HeartbeatResponse = await stub.Heartbeat(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise
        if answer.leaving and (known := self._routers.get(router)) is not None:
            known.is_leaving = True
        self._say_whether_reached(router, told(answer.unreached))
        if answer.HasField("prefill"):
            self._on_prefill(router, tuple(answer.prefill.addresses))
        return True
