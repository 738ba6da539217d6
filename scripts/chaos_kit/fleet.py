"""Two routers, P prefill and D decode workers behind proxies; what dies is started again with a new epoch."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
from fleet_process import free_port

from chaos_kit.catalogue import MAX_MODEL_LEN
from chaos_kit.member import Member, kill_all
from chaos_kit.proxy import Connection, Proxy
from jdisagg.core.config import LocalPrefill
from jdisagg.roles.engine_thread import EngineBroken
from jdisagg.serve.engines import EXIT_ENGINE_CRASHED

WATCH_S = 0.05
SIZES = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--page-size", "16", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "64", "--transfer-chunk-tokens", "32", "--lease-s", "4"),
)
PREFILL_PAGES, DECODE_PAGES = 97, 81  # small: prompts wait
SCARCE = ("--num-pages", "25", "--reserved-decode-tokens", "0")
HOST_KV_BYTES = 8 << 20
NUM_ROUTERS = 2
PAST_FORWARDERS = ("jax", "shm", "tcp")  # backends
_TRACEBACK_SHOWN = 400  # characters


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """What to start."""

    model: str
    num_prefill: int = 2
    num_decode: int = 2
    dtype: str = "auto"
    numerics: str = "exact"
    local_prefill: str = "on-failure"
    transfer_backend: str = "grpc"  # what travels through shared memory passes no forwarder
    seed: int = 0
    sizes: tuple[str, ...] = SIZES
    prefill_flags: tuple[str, ...] = ()  # win over those before
    decode_flags: tuple[str, ...] = ()
    beside: Path | None = None  # the checkout of another version: every second process is of that
    scarce: bool = False  # memory: D retracts streams, of which every second one keeps their KV on the host

    @property
    def transfers(self) -> bool:
        """Whether D gets KV from P while nothing is broken; with `below-tokens` it may be that no prompt is long enough."""
        return self.num_prefill > 0 and self.local_prefill in (LocalPrefill.ON_FAILURE.value, LocalPrefill.NEVER.value)

    @property
    def model_flags(self) -> tuple[str, ...]:
        """Flags that decide which tokens come out."""
        return ("--model", self.model, "--dtype", self.dtype, "--numerics", self.numerics, *self.sizes)


class Fleet:
    """Lives on one event loop in the main thread, which its processes do not outlive."""

    def __init__(self, plan: FleetPlan, directory: Path, http: httpx.AsyncClient) -> None:
        self.plan = plan
        self.worker_drill = self.router_drill = ""  # JDISAGG_TEST_FAULTS of what is started from now on, without seeds
        self.routers: list[Member] = []
        self.prefill: list[Member] = []
        self.decode: list[Member] = []
        self.ended: list[tuple[str, int | None, str]] = []  # unasked, as none should: name, exit status, end of its log
        self.on_transfer: Callable[[Proxy, Connection], None] = _ignore
        self._directory = directory
        self._http = http
        self._tasks: list[asyncio.Task[None]] = []
        self._busy: set[str] = set()  # members that are being struck or restarted on purpose
        self._seeds = random.Random(plan.seed)

    @property
    def workers(self) -> list[Member]:
        """P and D."""
        return [*self.prefill, *self.decode]

    @property
    def members(self) -> list[Member]:
        """Everybody."""
        return [*self.routers, *self.prefill, *self.decode]

    def pick(self, number: int) -> Member:
        """A router that is up, turn by turn; any when none is."""
        up = [router for router in self.routers if router.up] or self.routers
        return up[number % len(up)]

    async def start(self) -> None:
        """All processes, READY and known to each router. Raises RuntimeError with the end of a log."""
        plan = self.plan
        ports = [(free_port(), free_port()) for _ in range(NUM_ROUTERS)]
        for number, (http, grpc) in enumerate(ports, 1):
            flags = ("--role", "router", "--model", plan.model, "--port", str(http), "--grpc-port", str(grpc))
            flags = (*flags, "--replay-budget", "4")  # as many deaths as here would use up any fleet's
            self.routers.append(self._member(f"R{number}", None, *flags))
        join = ("--router", ",".join(f"127.0.0.1:{grpc}" for _, grpc in ports), *plan.model_flags)
        join = (*join, "--kv-transfer-backend", plan.transfer_backend)
        for number in range(1, plan.num_prefill + 1):
            flags = ("--role", "prefill", "--num-pages", str(PREFILL_PAGES), *join, *plan.prefill_flags)
            self.prefill.append(self._member(f"P{number}", await self._proxy(), *flags))
        for number in range(1, plan.num_decode + 1):
            flags = ("--role", "decode", "--num-pages", str(DECODE_PAGES), "--local-prefill", plan.local_prefill, *join)
            if plan.scarce:
                flags = (*flags, *SCARCE, "--host-kv-bytes", "0" if number % 2 else str(HOST_KV_BYTES))
            flags = (*flags, *plan.decode_flags)
            self.decode.append(self._member(f"D{number}", await self._proxy(), *flags))
        for member in self.members:
            self.launch(member)
        await asyncio.gather(*(member.wait_ready() for member in self.members))
        await self.until_whole(30.0)
        self._tasks.append(asyncio.create_task(self._supervise()))

    def _member(self, name: str, proxy: Proxy | None, *flags: str) -> Member:
        # Else glibc keeps the largest buffer of a step for each thread that ever ran one, and RSS with it.
        env = {"MALLOC_MMAP_THRESHOLD_": str(2**20)} if self.plan.scarce else None
        return Member(name, *flags, directory=self._directory, http=self._http, proxy=proxy, env=env)

    async def _proxy(self) -> Proxy:
        return await Proxy(self._pass_on, past=PAST_FORWARDERS).start()

    def _pass_on(self, proxy: Proxy, connection: Connection) -> None:
        self.on_transfer(proxy, connection)

    def launch(self, member: Member) -> None:
        """Start a process for `member` with its share of the drill."""
        drill = self.router_drill if member.proxy is None else self.worker_drill
        faults = f"{drill},seed:{self._seeds.randrange(2**20)}" if drill else ""
        env = {"JDISAGG_TEST_HOOKS": "1", "JDISAGG_TEST_FAULTS": faults}
        turn = int(member.name[1:]) + member.incarnation  # so each place in the fleet changes with every restart
        member.start(env, self.plan.beside if turn % 2 else None)

    async def until_whole(self, timeout_s: float, *, trusted: bool = False) -> None:
        """Until each router sees every worker, is linked to each D and, if `trusted`, avoids none of them for having failed
        lately; raises RuntimeError with what is missing."""
        deadline_s = monotonic() + timeout_s
        missing = "everything"
        while missing:
            if monotonic() > deadline_s:
                raise RuntimeError(f"not whole within {timeout_s:g} s: {missing}")
            await asyncio.sleep(0.1)
            missing = await self._missing(trusted)

    async def _missing(self, trusted: bool) -> str:
        down = [member.name for member in self.members if not member.up or member.frozen]
        if down:
            return f"{', '.join(down)} not up"
        wanted = {member.address: member for member in self.workers}
        for router in self.routers:
            try:
                seen = await _seen_by(router)
            except httpx.HTTPError as error:
                return f"{router.name}: {error!r}"
            for address, member in wanted.items():
                found = seen.get(address)
                if found is None or found["draining"]:
                    return f"{member.name} at {router.name}: {found}"
                if member in self.decode and (not found["linked"] or (trusted and found["suspect"])):
                    return f"{member.name} at {router.name}: {found}"
        return ""

    async def until_missed(self, members: Sequence[Member], timeout_s: float) -> None:
        """Until no router knows any of the workers `members`, which are dead; raises RuntimeError with who does."""
        deadline_s = monotonic() + timeout_s
        gone, knows = {member.address for member in members}, "none was asked"
        while knows:
            if monotonic() > deadline_s:
                raise RuntimeError(f"not missed within {timeout_s:g} s: {knows}")
            await asyncio.sleep(WATCH_S)
            try:
                seen = {router.name: gone & (await _seen_by(router)).keys() for router in self.routers}
            except httpx.HTTPError as error:
                knows = repr(error)
            else:
                knows = "; ".join(f"{name} knows {', '.join(sorted(known))}" for name, known in seen.items() if known)

    def kill(self, member: Member) -> None:
        """SIGKILL, and no other process in its place before `restart`."""
        self._busy.add(member.name)
        member.kill()

    def break_engine(self, member: Member) -> None:
        """Its engine raises; no other process in its place before `restart`."""
        self._busy.add(member.name)
        member.break_engine()

    async def until_fallen(self, member: Member, timeout_s: float) -> None:
        """Until the process whose engine broke has ended by itself; raises RuntimeError when it does not, or ends otherwise."""
        process = member.process
        assert process is not None
        try:
            status = await asyncio.to_thread(process.process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{member.name} has not ended {timeout_s:g} s after its engine broke") from None
        if status != EXIT_ENGINE_CRASHED and self.plan.beside is None:  # older versions know no such thing, and just die
            raise RuntimeError(f"{member.name}, whose engine broke, ended with {status}, not with {EXIT_ENGINE_CRASHED}")

    def tracebacks(self) -> set[str]:
        """Lines of the logs; a log has a line for each. That of an engine which was made to fail is none."""
        lines = ((member.name, line) for member in self.members for line in member.logs().splitlines())
        found = ((name, line) for name, line in lines if "Traceback (" in line and EngineBroken.__name__ not in line)
        return {f"{name}: {line[:_TRACEBACK_SHOWN]}" for name, line in found}

    def complaints(self) -> list[str]:
        """What no process of a fleet does, whatever is done to it, since the start: it died by itself, or left a traceback."""
        deaths = [f"died by itself: {name}, exit status {status}: {tail}" for name, status, tail in self.ended]
        return deaths + [f"traceback in a log: {line}" for line in sorted(self.tracebacks())]

    async def restart(self, member: Member, *, drains: bool = False) -> None:
        """End the process, by SIGTERM if it `drains`, else by SIGKILL; then start another and wait until it is READY."""
        self._busy.add(member.name)
        try:
            if drains:
                status = await member.end()
                if status != 0:
                    self.ended.append((f"{member.name} after SIGTERM", status, _tail(member)))
            else:
                member.kill()
            await member.reap()
            self.launch(member)
            await member.wait_ready()
        finally:
            self._busy.discard(member.name)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for member in self.members:
                if member.gone and member.name not in self._busy and member.process is not None:
                    self._busy.add(member.name)
                    status = await asyncio.to_thread(member.process.process.wait)
                    self.ended.append((member.name, status, _tail(member)))
                    await self.restart(member)

    async def close(self) -> None:
        """End every process, every proxy and every task."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await kill_all(self.members)
        await asyncio.gather(*(member.proxy.close() for member in self.workers if member.proxy is not None))


async def _seen_by(router: Member) -> dict[str, dict[str, Any]]:
    return {found["address"]: found for found in (await router.state())["members"]}


def _tail(member: Member) -> str:
    return member.log.read_text(errors="replace")[-3000:]


def _ignore(*_: object) -> None:
    """Nobody waits for a transfer."""
