"""FleetService of a router: workers register and send heartbeats. What that means is the registry's business.

A router that ends says so in its last answers to heartbeats, so that its workers do not take it for an outage.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Protocol

import grpc
import grpc.aio

from jdisagg.api.codec import refuse
from jdisagg.api.fleet.codec import decode_member, decode_report, encode_member, encode_standing
from jdisagg.api.fleet.elsewhere import nobody_reaches
from jdisagg.api.status_details import end_call
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import InvalidRequest, Unavailable, Unfit
from jdisagg.core.fleet import Member, Report, Standing
from jdisagg.core.logs import Seldom
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0  # a worker that is turned away tries again several times a second
TOLD_APART = 32  # such workers; of others one line is said


class Registry(Protocol):
    """Who is in the fleet; `jdisagg.router.workers.Workers`."""

    def register(self, member: Member) -> None:
        """Add it, or replace what was at its address. Raises AddressTaken while that is alive, Unfit for one of another
        model, and Unavailable once the router is closed."""
        ...

    def heartbeat(self, address: str, epoch: str, report: Report) -> bool:
        """False when that process is not known here: it must register again."""
        ...

    def prefill_for(self, address: str) -> tuple[str, ...] | None:
        """Prefill workers for the decode worker there, least busy first; None for other workers."""
        ...

    def why_unreached(self, address: str) -> str:
        """Why no stream to the worker there can be opened; "" = it can, as far as is known."""
        ...

    def members(self) -> list[Member]:
        """Everybody alive."""
        ...

    def standings(self) -> list[tuple[Member, Standing]]:
        """The same, each with what is made of it."""
        ...


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Add it to a grpc.aio server with `add_FleetServiceServicer_to_server`."""

    def __init__(self, registry: Registry, config: TransferConfig) -> None:
        self._registry = registry
        self._config = config
        self._leaving = False
        self._told: set[str] = set()  # addresses whose heartbeat was answered since `leave`
        self._turned_away: dict[str, Seldom] = {}  # by what is said of them

    def leave(self) -> None:
        """From now on tell every worker that this router is about to end."""
        self._leaving = True

    async def everybody_told(self) -> None:
        """After `leave`: wait until each worker has been told, at most two heartbeats (a dead one never will be)."""
        deadline_s = monotonic() + 2 * self._config.heartbeat_s
        while {member.address for member in self._registry.members()} - self._told and monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.RegisterResponse | None:
        """A worker is there."""
        try:
            member = decode_member(request.member)
            if why := nobody_reaches(member.address, context.peer()):
                self._say_turned_away(member.role.value, why)
                raise Unfit(why)
            self._registry.register(member)
        except (InvalidRequest, Unavailable) as error:
            return refuse(context, error)
        return fleet_pb2.RegisterResponse(
            heartbeat_ms=round(self._config.heartbeat_s * 1000), dead_after_ms=round(self._config.dead_after_s * 1000)
        )

    def _say_turned_away(self, role: str, why: str) -> None:
        kind, text = f"{role} worker: {why}", "%s worker: %s"
        if kind not in self._turned_away and len(self._turned_away) >= TOLD_APART:
            kind, text = "", "one of several, a %s worker: %s"
        seldom = self._turned_away.setdefault(kind, Seldom(TOLD_EVERY_S))
        seldom.say(log, logging.ERROR, text, role, why, now_s=monotonic())

    async def Heartbeat(
        self, request: fleet_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.HeartbeatResponse | None:
        """A worker is still there; NOT_FOUND asks it to register."""
        if not self._registry.heartbeat(request.address, request.epoch, decode_report(request)):
            return end_call(context, grpc.StatusCode.NOT_FOUND, f"{request.address} is not registered here; register again")
        if self._leaving:
            self._told.add(request.address)
        peers = self._registry.prefill_for(request.address)
        prefill = None if peers is None else fleet_pb2.PrefillWorkers(addresses=peers)
        unreached = self._registry.why_unreached(request.address)
        return fleet_pb2.HeartbeatResponse(leaving=self._leaving, prefill=prefill, unreached=unreached)

    async def List(self, request: fleet_pb2.ListRequest, context: grpc.aio.ServicerContext) -> fleet_pb2.ListResponse:
        """The fleet."""
        found = self._registry.standings()
        return fleet_pb2.ListResponse(
            members=[encode_member(member) for member, _ in found],
            standings=[encode_standing(standing) for _, standing in found],
        )
