"""Requests whose streams last, blows that fall while they run, and what must be true of both afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import grpc.aio

from jdisagg.v1 import common_pb2
from tests.e2e.client import OPTIONS, Asked, Got, generate
from tests.e2e.conftest import Start
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tries import fair

FREE_S = 30.0  # until everything is, which takes less than one


def long_requests(count: int, seed: int, max_tokens: int = 160) -> list[Asked]:
    """Every third has a grammar, which its tokens do not come to the end of."""
    rng = random.Random(seed)
    letters = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="[a-z ]{2000,}")
    return [
        Asked(
            prompt=tuple(rng.randrange(16, 1024) for _ in range(rng.choice((5, 20, 40, 70)))),
            sampling={
                "max_tokens": max_tokens,
                "seed": rng.randrange(2**31),
                "temperature": rng.choice((0.0, 0.9)),
                **({"grammar": letters} if number % 3 == 2 else {"ignore_eos": True}),
            },
            request_id=f"long-{seed}-{number}",
        )
        for number in range(count)
    ]


async def interrupt(address: str, requests: list[Asked], after_s: float, blow: Callable[[], object]) -> list[Got]:
    """Run the requests together and call `blow` after `after_s`, on a thread: it may wait for its moment."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        tasks = [asyncio.create_task(generate(channel, asked)) for asked in requests]
        await asyncio.sleep(after_s)
        await asyncio.to_thread(blow)
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)


def assert_exact(got: list[Got], wanted: list[Got]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.error is None, one.error
        assert one.complete is not None, "a stream that is whole says so"
        assert one.tokens == other.tokens
        assert one.finish == other.finish


def assert_same(requests: list[Asked], wanted: list[Got], got: list[Got]) -> None:
    """As `assert_exact`, and texts and log-probabilities too: float32, equal to the last bit."""
    for asked, one, other in zip(requests, wanted, got, strict=True):
        assert other.error is None, (asked.request_id, other.error)
        assert other.complete is not None, asked.request_id
        assert other.essence() == one.essence(), asked.request_id
        assert other.logprobs == one.logprobs, asked.request_id


def wait_all_free(server: ServerProcess) -> None:
    wait_until(lambda: server.metric("jdisagg_kv_pages_used") == 0, FREE_S, f"{server.flags[1]}: all pages free")


def assert_quiescent(server: ServerProcess) -> None:
    wait_until(lambda: not server.left_over(), FREE_S, f"{server.flags[1]} holds nothing", server.left_over)


def once(holds: Callable[[], object], what: str) -> None:
    """Until it holds, or for 10 s: then they had ended before anybody looked, and who strikes now sees that nobody was hit."""
    with suppress(AssertionError):
        wait_until(holds, 10, what)


def kill_prefill_amid_handoffs(start: Start, flags: tuple[str, ...], requests: list[Asked], wanted: list[Got]) -> ServerProcess:
    """A new P and D, and P killed as soon as D has hand-offs; the D of the last try. Every stream must be exact."""

    def killed(_: int) -> ServerProcess:
        prefill = start("prefill", "--role", "prefill", *flags).wait_ready()
        decode = start("decode", "--role", "decode", "--prefill", prefill.grpc, *flags).wait_ready()

        def strike() -> None:
            once(lambda: decode.state()["handoff"]["handoffs"], "hand-offs are under way")
            prefill.kill()

        assert_exact(asyncio.run(interrupt(decode.grpc, requests, 0.05, strike)), wanted)
        return decode

    def nothing_computed(decode: ServerProcess) -> bool:
        """By D itself; then its processor is for another one."""
        if decode.metric("jdisagg_recoveries_total", rung="local_prefill") > 0:
            return False
        decode.stop()
        return True

    return fair(killed, nothing_computed, "the blow came when every hand-off had ended")
