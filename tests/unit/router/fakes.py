"""A worker whose engine is arithmetic, behind the real WorkerService and the real registration."""

from __future__ import annotations

import asyncio
from typing import Any

from jdisagg.api.fleet.client import FleetClient
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import RequestError, Unavailable
from jdisagg.core.fleet import Load, Report
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Provenance, Role
from jdisagg.roles.ports import OutputSink
from jdisagg.router.fleet_engine import FleetEngine
from jdisagg.router.recovery import ReplayConfig
from jdisagg.router.service import FleetService
from jdisagg.v1 import fleet_pb2_grpc, worker_pb2_grpc
from tests.unit.wire.rig import FAST, member, start_server, until

TICK_S = 0.008


def token_at(prompt: tuple[int, ...], index: int) -> int:
    """The `index`-th generated token: a function of the prompt and the position alone."""
    return (sum(prompt) * 31 + index * 7 + len(prompt)) % 997


def expected(request: EngineRequest) -> list[int]:
    """What the client must get."""
    prompt = request.prompt_token_ids
    return [token_at(prompt, i) for i in range(len(request.generated_token_ids), request.sampling.max_tokens)]


class ArithmeticEngine:
    """One token per live request and tick. Follows WorkerEngine."""

    def __init__(self) -> None:
        self.ticks = 0
        self.frozen = False
        self.is_over = False
        self.poison: int | None = None  # a first token at which it raises
        self.refuse: RequestError | None = None
        self.refusals: list[RequestError] = []  # each is used once; may be shared
        self.live: dict[str, tuple[EngineRequest, OutputSink, list[int]]] = {}
        self.seen: list[EngineRequest] = []
        self.had_enough: list[str] = []  # requests cancelled because of that

    def submit(self, request: EngineRequest, sink: OutputSink, front_end: str) -> None:
        self.seen.append(request)
        self._last_sink = sink
        if self.refuse is not None or self.refusals:
            sink([self._end(request, self.refuse or self.refusals.pop())])
            return
        known = list(request.generated_token_ids)
        assert known == [token_at(request.prompt_token_ids, i) for i in range(len(known))], "replay carries the wrong tokens"
        self.live[request.request_id] = (request, sink, known)
        if request.prompt_token_ids[0] == self.poison:
            self.crash()

    def crash(self) -> None:
        """As one whose step raises: everybody gets an error, and the process has a moment left."""
        self.frozen = self.is_over = True
        gone = Unavailable("the engine stopped; send the request again")
        for request, sink, _ in self.live.values():
            sink([self._end(request, gone)])
        self.live.clear()

    def say(self, output: Output) -> None:
        """Send an output that nothing asked for."""
        self._last_sink([output])

    def cancel(self, request_id: str, attempt: int, sink: OutputSink, *, enough: bool = False) -> None:
        mine = self.live.get(request_id)
        if mine is not None and (mine[0].attempt, mine[1]) == (attempt, sink):
            del self.live[request_id]
            self.had_enough += [request_id] if enough else []

    @property
    def load(self) -> Load:
        return Load(running=len(self.live), free_pages=10, total_pages=10)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self.frozen:
                self.tick()

    def tick(self) -> None:
        self.ticks += 1
        by_sink: dict[int, tuple[OutputSink, list[Output]]] = {}
        for request, sink, tokens in list(self.live.values()):
            tokens.append(token_at(request.prompt_token_ids, len(tokens)))
            last = len(tokens) >= request.sampling.max_tokens
            asked = next(iter(request.prefill_peers), "")  # which computed it, for all that is known
            provenance = Provenance(prefill_worker=asked, decode_worker="arithmetic", recoveries=("refetch",))
            output = Output(
                request_id=request.request_id,
                attempt=request.attempt,
                token_ids=(tokens[-1],),
                finish=FinishReason.LENGTH if last else None,
                provenance=provenance if last else None,
            )
            by_sink.setdefault(id(sink), (sink, []))[1].append(output)
            if last:
                del self.live[request.request_id]
        for sink, outputs in by_sink.values():
            sink(outputs)

    def _end(self, request: EngineRequest, error: RequestError) -> Output:
        return Output(request_id=request.request_id, attempt=request.attempt, finish=FinishReason.ERROR, error=error)


class FakeWorker:
    """One process of a fleet, in this process."""

    def __init__(
        self, routers: tuple[str, ...], role: Role = Role.DECODE, config: TransferConfig = FAST, **changes: Any
    ) -> None:
        self.engine = ArithmeticEngine()
        self.draining = False
        self.not_ready = ""
        self.uptime_s = 0
        self.prefill: dict[str, tuple[str, ...]] = {}  # by router, as last told
        self._routers = routers
        self._role = role
        self._member: dict[str, Any] = {
            "epoch": f"epoch-{id(self)}",
            "fingerprint": "weights-1",
            "max_model_len": 20_000,
            "name": "demo",
        } | changes
        self.service = WorkerService(self.engine, config, worker="a fake", epoch=self._member["epoch"])

    @property
    def fingerprint(self) -> str:
        return self._member["fingerprint"]

    async def start(self, port: int = 0, *, advertised: str | None = None) -> FakeWorker:
        self._server, self.address = await start_server(
            lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.service, server), port
        )
        self.port = int(self.address.rpartition(":")[2])
        self.address = advertised or self.address
        described = member(
            role=self._role, address=self.address, worker=f"fake @ {self.address}", vocab_size=1000, **self._member
        )
        self._ticking = asyncio.create_task(self.engine.run())
        self.registration = FleetClient(
            described,
            self._routers,
            state=lambda: Report(self.engine.load, self.draining, self.not_ready, uptime_s=self.uptime_s),
            on_prefill=self.prefill.__setitem__,
        )
        return self

    async def announce(self) -> None:
        """Heartbeat at once: its routers know what it says of itself, also those whose answer to its registration has yet to be
        read."""
        await until(lambda: all(self.registration.registered().values()))
        await self.registration.announce()

    async def die(self) -> None:
        """Everything stops at once, as after a kill."""
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await self.registration.close()
        await self._server.stop(0)


class Router:
    """FleetEngine behind a FleetService, on a real port."""

    def __init__(
        self,
        replay: ReplayConfig | None = None,
        config: TransferConfig = FAST,
        **options: Any,
    ) -> None:
        self.metrics = Metrics(engine=False)
        self.engine = FleetEngine(config=config, metrics=self.metrics, replay=replay, **options)
        self._config = config

    async def start(self, port: int = 0) -> Router:
        self.service = service = FleetService(self.engine.workers, self._config)
        self._server, self.address = await start_server(
            lambda server: fleet_pb2_grpc.add_FleetServiceServicer_to_server(service, server), port
        )
        return self

    async def stop(self) -> None:
        await self.engine.close()
        await self._server.stop(0)

    def linked(self) -> int:
        return sum(entry.linked for entry in self.engine.workers.fleet.entries())

    def replays(self) -> float:
        return self.metrics.fleet.recoveries.labels(rung="replay")._value.get()
