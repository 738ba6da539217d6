"""A router, P and D, each on a host of its own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import httpx

from chaos_kit.catalogue import LOWEST_TOKEN, VOCAB
from chaos_kit.cuts import DECODE, HOSTS, PREFILL
from chaos_kit.fleet import FleetPlan
from chaos_kit.leaks import GAUGES
from chaos_kit.member import Member, kill_all
from chaos_kit.network import Network

HTTP_PORT, GRPC_PORT = 8000, 9000  # the same everywhere: a host has all ports
PAGES = 400
PROBES, PROBE_TOKENS, PROBE_TIMEOUT_S = 4, 48, 10.0
START_S = 30.0  # from READY to whole
RUNGS = ("jdisagg_recoveries_total", "jdisagg_prefill_hedges_total", "jdisagg_transfer_failures_total")
HELD = ("jdisagg_requests{", *GAUGES)


class HostFleet:
    """Its members by the names of their hosts. Looks at them over the network, as anybody would."""

    def __init__(self, plan: FleetPlan, network: Network, directory: Path, http: httpx.AsyncClient) -> None:
        self._members: dict[str, Member] = {}
        self._http = http
        self._rng = random.Random(44)
        router = f"{network.hosts['r'].address}:{GRPC_PORT}"
        # As many deaths as there seem to be here would use up any fleet's budget of replays.
        by_role = {"r": ("--role", "router", "--model", plan.model, "--replay-budget", "4")}
        worker = (*plan.model_flags, "--num-pages", str(PAGES), "--router", router)
        worker = (*worker, "--kv-transfer-backend", plan.transfer_backend)
        by_role |= dict.fromkeys(PREFILL, ("--role", "prefill", *worker))
        by_role |= dict.fromkeys(DECODE, ("--role", "decode", "--local-prefill", plan.local_prefill, *worker))
        for name in HOSTS:
            host = network.hosts[name]
            flags = (*by_role[name], "--host", host.address, "--port", str(HTTP_PORT), "--grpc-port", str(GRPC_PORT))
            member = Member(name, *flags, directory=directory, http=http, enter=host.enter)
            self._members[name] = member

    @property
    def router(self) -> Member:
        """The one that clients ask."""
        return self._members["r"]

    async def start(self) -> None:
        """Until all are READY, and known to each other. Raises RuntimeError."""
        for member in self._members.values():
            member.start({})
        await asyncio.gather(*(member.wait_ready() for member in self._members.values()))
        missing = await self.until_whole(START_S)
        if missing:
            raise RuntimeError(f"not whole: {missing}")

    async def until_whole(self, timeout_s: float) -> str:
        """Until the router has every worker and each D has prompts computed by each P; what is still missing after that time,
        else empty."""
        return await _until_empty(self._missing, timeout_s)

    async def until_at_rest(self, timeout_s: float) -> str:
        """Until nobody holds anything for a request; what is still held after that time, else empty."""
        return await _until_empty(self._held, timeout_s)

    def ended(self) -> dict[str, str]:
        """Who has ended, with the end of its log. Nobody should."""
        gone = [member for member in self._members.values() if member.gone]
        return {member.name: member.log.read_text(errors="replace")[-2000:] for member in gone}

    async def rungs(self) -> Counter[str]:
        """What was done to survive failures, since the start, by those that can be reached now."""
        found: Counter[str] = Counter()
        for member in self._members.values():
            with suppress(httpx.HTTPError):
                for name, value in (await member.metrics()).items():
                    if name.startswith(RUNGS):
                        found[_label(name)] += int(value)
        return found

    async def kv_bytes(self) -> int:
        """What came to the D over the network."""
        wanted = "jdisagg_transfer_bytes_total"
        texts = [await self._members[name].metrics() for name in DECODE]
        return int(sum(value for found in texts for name, value in found.items() if name.startswith(wanted)))

    async def close(self) -> None:
        """Kill all of them."""
        await kill_all(self._members.values())

    async def _missing(self) -> str:
        counts = await self.router.metrics()
        wanted = {"prefill": len(PREFILL), "decode": len(DECODE)}
        seen = {role: int(counts.get(f'jdisagg_workers{{role="{role}"}}', 0)) for role in wanted}
        if seen != wanted:
            return f"the router has {seen}"
        found = await asyncio.gather(*(self._prefilled_at(self._members[name]) for name in DECODE))
        missing = {name: sorted(set(PREFILL) - places) for name, places in zip(DECODE, found, strict=True)}
        return "; ".join(f"{name} takes no prompt to {', '.join(names)}" for name, names in missing.items() if names)

    async def _prefilled_at(self, decode: Member) -> set[str]:
        """The P that compute some prompts which are sent to this D at once. A D gives one after the other to each P, except to
        those that have failed it a moment ago, and a P that it has doubts about learns so that it is back."""
        prompts = [[self._rng.randrange(LOWEST_TOKEN, VOCAB) for _ in range(PROBE_TOKENS)] for _ in range(PROBES)]
        bodies = [{"prompt": prompt, "max_tokens": 2, "ignore_eos": True} for prompt in prompts]
        url, ask = f"http://{decode.http}/v1/completions", {"x-jdisagg-provenance": "1"}
        answers = await asyncio.gather(
            *(self._http.post(url, json=body, headers=ask, timeout=PROBE_TIMEOUT_S) for body in bodies)
        )
        workers = " ".join(answer.json().get("jdisagg", {}).get("prefill_worker", "") for answer in answers)
        return {name for name in PREFILL if f"{self._members[name].grpc}" in workers.split()}

    async def _held(self) -> str:
        held: list[str] = []
        for member in self._members.values():
            found = await member.metrics()
            held += [f"{member.name}: {name} {value:g}" for name, value in found.items() if name.startswith(HELD) and value]
        return "; ".join(held)


async def _until_empty(look: Callable[[], Awaitable[str]], timeout_s: float) -> str:
    until_s = monotonic() + timeout_s
    while True:
        try:
            found = await look()
        except httpx.HTTPError as error:
            found = repr(error)
        if not found or monotonic() > until_s:
            return found
        await asyncio.sleep(0.1)


def _label(sample: str) -> str:
    """`recoveries{rung="replay"}` is `replay`, others are known by all of their labels."""
    name, _, labels = sample.partition("{")
    values = " ".join(part.split('"')[1] for part in labels.split(",") if '"' in part)
    return values if name.startswith("jdisagg_recoveries") else f"{name.split('_')[-2].rstrip('s')} {values}"
