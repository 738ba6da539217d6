"""FleetService of a router: workers register and send heartbeats. What that means is the business of `Workers`.

A router that ends says so in its last answers to heartbeats, so that its workers do not take it for an outage.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import grpc
import grpc.aio

from jdisagg.api.codec import refuse
from jdisagg.api.fleet.codec import decode_member, decode_report, encode_lost, encode_member, encode_standing
from jdisagg.api.fleet.elsewhere import nobody_reaches
from jdisagg.api.status_details import end_call
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import InvalidRequest, Unavailable, Unfit
from jdisagg.core.logs import Seldom
from jdisagg.router.workers import Workers
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0  # a worker that is turned away tries again several times a second
TOLD_APART = 32  # such workers; of others one line is said
GOODBYE_S = 3.0  # for workers that wait for a core: who is not told takes our end for an outage. Beyond --drain-s


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Add it to a grpc.aio server with `add_FleetServiceServicer_to_server`."""

    def __init__(self, workers: Workers, config: TransferConfig) -> None:
        self._workers = workers
        self._config = config
        self._leaving = False
        self._told: set[str] = set()  # addresses whose heartbeat was answered since `leave`
        self._turned_away: dict[str, Seldom] = {}  # by what is said of them

    def leave(self) -> None:
        """From now on tell every worker that this router is about to end."""
        self._leaving = True

    async def everybody_told(self) -> None:
        """After `leave`: wait until each worker has been told or is given up, at most GOODBYE_S, or two heartbeats where these
        are longer."""
        deadline_s = monotonic() + max(GOODBYE_S, 2 * self._config.heartbeat_s)
        while {member.address for member in self._workers.members()} - self._told and monotonic() < deadline_s:
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
            self._workers.register(member)
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
        if (entry := self._workers.heartbeat(request.address, request.epoch, decode_report(request))) is None:
            return end_call(context, grpc.StatusCode.NOT_FOUND, f"{request.address} is not registered here; register again")
        if self._leaving:
            self._told.add(request.address)
        peers = self._workers.fleet.prefill_for(entry)
        prefill = None if peers is None else fleet_pb2.PrefillWorkers(addresses=peers)
        return fleet_pb2.HeartbeatResponse(leaving=self._leaving, prefill=prefill, unreached=entry.reach.why_not)

    async def List(self, request: fleet_pb2.ListRequest, context: grpc.aio.ServicerContext) -> fleet_pb2.ListResponse:
        """The fleet."""
        found = self._workers.fleet.standings(monotonic())
        return fleet_pb2.ListResponse(
            members=[encode_member(member) for member, _ in found],
            standings=[encode_standing(standing) for _, standing in found],
            lost=[encode_lost(lost) for lost in self._workers.lost()],
        )
