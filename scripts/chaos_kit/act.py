"""One attempt at a cell of the table: requests are sent, one is held in a state, a process is struck, everything is healed."""

from __future__ import annotations

import asyncio
from enum import Enum
from time import monotonic

from chaos_kit.fleet import Fleet
from chaos_kit.lookout import Lookout, View
from chaos_kit.member import Member
from chaos_kit.proxy import Weather
from chaos_kit.stages import SCENES, SUBJECTS, Hold, Scene, Stage
from chaos_kit.stream import Stream

REACH_S = 8.0
WHOLE_S = 90.0
FROZEN_LEAST_S, FROZEN_MOST_S, FROZEN_ROUTER_S = 1.5, 6.0, 3.0  # beyond the silence that makes a peer dead


class Victim(Enum):
    """Whom the blow hits: the one that has the request, or would have it."""

    ROUTER = "router"
    PREFILL = "P"
    DECODE = "D"


class Blow(Enum):
    """How."""

    KILL = "kill -9"
    STOP = "SIGSTOP"


class Act:
    """One attempt at a cell, from the first request to the healed fleet."""

    def __init__(self, fleet: Fleet, scene: Scene, number: int) -> None:
        self.scene = scene
        self.struck: Member | None = None
        self.struck_s = 0.0
        name = f"cell-{number}"
        self.others = [Stream(name=f"{name}-other-{i}", entry=entry) for i, entry in enumerate(scene.others)]
        self.subject = Stream(name=name, entry=SUBJECTS[number % len(SUBJECTS)])
        self._fleet = fleet
        self._lookout = Lookout(fleet, name)
        self._tasks: list[asyncio.Task[Stream]] = []
        self._frozen_d: Member | None = None
        self._ports: dict[Member, int | None] = {}  # of workers that cannot be reached
        self._whole = asyncio.Event()

    # --- before the blow

    async def bring_about(self) -> View | None:
        """Send everything and hold the subject; None when the state went by unseen."""
        self._hold()
        for other in self.others:
            self._send(other)
        await self._until_others_run()
        by_client = self.scene is SCENES[Stage.AFTER_LAST]
        if by_client:
            self.subject.on_tokens = self._note_whole
        self._send(self.subject)
        try:
            async with asyncio.timeout(REACH_S):
                return await self._until_whole() if by_client else await self._until_seen()
        except TimeoutError:
            return None

    def _send(self, stream: Stream) -> None:
        self._tasks.append(asyncio.create_task(stream.run(self._fleet.routers[0].grpc)))

    async def _until_others_run(self) -> None:
        async with asyncio.timeout(REACH_S * 4):
            while self.scene.others_run > sum(1 for other in self.others if len(other.tokens) > 1):
                await asyncio.sleep(0.005)

    async def _until_seen(self) -> View | None:
        while self.subject.ended_s is None:
            is_held = self._frozen_d is not None or self.scene.hold is not Hold.FROZEN_D
            view = await self._lookout.look()
            if is_held and self.scene.reached(view):
                return view
            if not is_held:
                self._freeze_receiver(view)
        return None

    def _freeze_receiver(self, view: View) -> None:
        """D stops as soon as it has given P credit."""
        granted = view.prefill is not None and view.prefill.handoff.get("credit_bytes", 0) > 0
        if granted and view.decode is not None:
            self._frozen_d = view.decode.member
            self._frozen_d.freeze()

    def _note_whole(self, stream: Stream) -> None:
        if stream.is_whole:
            self._whole.set()

    async def _until_whole(self) -> View:
        looking = asyncio.create_task(self._look_on())
        try:
            await self._whole.wait()
        finally:
            looking.cancel()
        return View()

    async def _look_on(self) -> None:
        """Who has the request."""
        while True:
            await self._lookout.look()

    # --- holds

    def _hold(self) -> None:
        if self.scene.hold is Hold.UNREACHABLE:
            for member in self._fleet.decode:
                assert member.proxy is not None
                self._ports[member], member.proxy.target_port = member.proxy.target_port, None
                member.proxy.cut()
        elif self.scene.hold is Hold.SLOW_P:
            self._set_weather(Weather.SLOW)

    def let_go(self) -> None:
        """Undo the hold."""
        for member, port in self._ports.items():
            assert member.proxy is not None
            member.proxy.target_port = port
        self._ports = {}
        if self.scene.hold is Hold.SLOW_P:
            self._set_weather(Weather.CLEAR)
        frozen, self._frozen_d = self._frozen_d, None
        if frozen is not None and frozen is not self.struck:
            frozen.thaw()

    def _set_weather(self, weather: Weather) -> None:
        for member in self._fleet.prefill:
            assert member.proxy is not None
            member.proxy.set_weather(weather)

    # --- the blow and after

    async def strike(self, victim: Victim, blow: Blow) -> None:
        """Now."""
        self.struck = self._find(victim)
        self.struck_s = monotonic()
        if blow is Blow.KILL:
            self._fleet.kill(self.struck)
        else:
            self.struck.freeze()

    def _find(self, victim: Victim) -> Member:
        fleet = self._fleet
        if victim is Victim.ROUTER:
            return fleet.routers[0]
        if victim is Victim.PREFILL:
            return self._lookout.seen_prefill or fleet.prefill[0]
        return self._frozen_d or self._lookout.seen_decode or fleet.decode[0]

    async def until_ended(self) -> None:
        """Every stream; a frozen process goes on when the subject has ended, or after a while."""
        struck = self.struck
        assert struck is not None
        if struck.frozen:
            most_s = FROZEN_ROUTER_S if struck in self._fleet.routers else FROZEN_MOST_S
            await asyncio.sleep(FROZEN_LEAST_S)
            await asyncio.wait(self._tasks[-1:], timeout=most_s - FROZEN_LEAST_S)
            struck.thaw()
        await asyncio.gather(*self._tasks)

    async def heal(self) -> None:
        """Start what was killed, thaw what is frozen, end what still runs."""
        if self.struck is not None and not self.struck.up:  # killed; the process may take a moment to be gone
            await self._fleet.restart(self.struck)
        elif self.struck is not None and self.struck.frozen:
            self.struck.thaw()
        await asyncio.gather(*self._tasks)
        await self._fleet.until_whole(WHOLE_S, trusted=True)
