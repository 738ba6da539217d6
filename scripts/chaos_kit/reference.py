"""The right answers, computed before anything is broken: by a fresh unified server without a prefix cache, and a few of them
by transformers as well."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import httpx

from chaos_kit.catalogue import Entry
from chaos_kit.client import Clients
from chaos_kit.fleet import FleetPlan
from chaos_kit.member import Member
from chaos_kit.outcome import Choices, Fate, Outcome, Visit

UNIFIED_PAGES = 300
AT_ONCE = 6
LIMIT_S = 120.0  # of one answer
NEAR_TIE = 1e-3  # logits closer than this may fall either way in another implementation; or than the rounding of 16 bits:
NEAR_TIES = {"bfloat16": 0.1, "float16": 0.01}


async def unified_answers(
    plan: FleetPlan, catalogue: Sequence[Entry], directory: Path, http: httpx.AsyncClient
) -> list[Choices]:
    """What comes of every entry. Raises RuntimeError when one fails."""
    flags = ("--role", "unified", *plan.model_flags, "--num-pages", str(UNIFIED_PAGES), "--no-enable-prefix-caching")
    member = Member("unified", *flags, directory=directory, http=http)
    clients = Clients(lambda _: member, http)
    try:
        member.start({})
        await member.wait_ready()
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Choices:
            visit = Visit(
                number=number, entry=number, fate=Fate.STAYS, after_s=0, over_http=False, stream=True, priority=0, cache_salt=""
            )
            outcome = Outcome(visit=visit)
            async with limit:
                await clients.run(outcome, catalogue[number], LIMIT_S)
            if not outcome.well:
                raise RuntimeError(f"the reference failed on entry {number}: {outcome.error}: {outcome.detail}")
            return outcome.choices

        return await asyncio.gather(*(one(number) for number in range(len(catalogue))))
    finally:
        await clients.close()
        if member.process is not None:
            await member.end()
            await member.reap()


def transformers_disagree(
    plan: FleetPlan, catalogue: Sequence[Entry], answers: Sequence[Choices], count: int
) -> list[str] | None:
    """What transformers in float32 answers otherwise, among the first `count` plain entries; None without torch."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    plain = [number for number, entry in enumerate(catalogue) if entry.plain][:count]
    torch_reference = importlib.import_module("chaos_kit.torch_reference")
    near_tie = NEAR_TIES.get(plan.dtype, NEAR_TIE)
    return torch_reference.disagreements(Path(plan.model), {n: (catalogue[n], answers[n][0].tokens) for n in plain}, near_tie)
