"""Any process may die or freeze at any moment: streams go on with exactly the tokens they would have had, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fleet_process import ROOT, free_port

from jdisagg.core.fleet import SUSPECT_S
from tests.e2e.blows import assert_exact, interrupt, kill_prefill_amid_handoffs, long_requests, once, wait_all_free
from tests.e2e.client import Got, run_all
from tests.e2e.conftest import PATIENT, Pair, Start, starting
from tests.e2e.fleets import Fleet
from tests.e2e.processes import ServerProcess, environment, wait_until
from tests.e2e.tries import fair

STREAMS = 8
LIMIT_S = 30.0  # of what takes a second or two
GAP_LIMIT_S = 30.0  # hangs are failures; scripts/drills.py measures


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, exact_flags: tuple[str, ...]) -> Iterator[Fleet]:
    with starting(tmp_path_factory.mktemp("fleet")) as start:
        yield Fleet(start=start, model=exact_flags[:2], flags=exact_flags[2:]).begin(num_routers=1)


def streaming_on(router: ServerProcess, worker: ServerProcess) -> set[str]:
    """IDs of the streams that this worker has begun to answer."""
    flights = router.state()["flights"]
    return {flight["request_id"] for flight in flights if flight["worker"] == worker.grpc and flight["delivered"]}


def once_streaming(router: ServerProcess, victim: ServerProcess, strike: Callable[[], object]) -> Callable[[], None]:
    """Call `strike` at once when the victim has a stream with tokens, however slow the machine is."""

    def blow() -> None:
        once(lambda: streaming_on(router, victim), "a stream of the victim has tokens")
        strike()

    return blow


@pytest.mark.timeout(480)
@pytest.mark.parametrize("freezes", [False, True])
def test_a_decode_worker_that_dies_or_freezes_is_replayed_exactly(fleet: Fleet, unified: ServerProcess, freezes: bool) -> None:
    """One after the other."""
    [router] = fleet.routers
    replayed: list[Got] = []
    for number, victim in enumerate(list(fleet.decode)):
        requests = long_requests(STREAMS, seed=300 + number if freezes else 100 + number)
        wanted = run_all(unified.grpc, requests)
        after_s = 0.15 + 0.25 * random.Random(number).random()
        strike = once_streaming(router, victim, partial(victim.signal, signal.SIGSTOP) if freezes else victim.kill)
        got = asyncio.run(interrupt(router.grpc, requests, after_s, strike))
        assert_exact(got, wanted)
        replayed += filter(_was_replayed, got)
        if freezes:
            victim.signal(signal.SIGCONT)
            fleet.wait_members()
        else:
            fleet.replace(victim)
    assert replayed, "no stream was on the worker that was struck"
    assert max(one.largest_gap_s for one in replayed) < GAP_LIMIT_S
    for server in fleet.workers:
        wait_all_free(server)


def _was_replayed(got: Got) -> bool:
    return got.complete is not None and any("replay" in choice.provenance.recoveries for choice in got.complete.choices)


@pytest.mark.parametrize("who", ["router", "every decode worker", "everybody"])
def test_a_pause_that_no_replay_could_mend_costs_none(fleet: Fleet, unified: ServerProcess, who: str) -> None:
    """Twice as long as makes dead. Everybody: the fleet's machine is moved while it runs."""
    requests = long_requests(STREAMS, seed=350 + len(who))
    wanted = run_all(unified.grpc, requests)
    [router] = fleet.routers
    everybody = [*fleet.decode, *fleet.prefill, router]  # the router wakes first, and hears nobody yet
    victims = {"router": [router], "everybody": everybody}.get(who, fleet.decode)

    def num_replays() -> float:
        return router.metric("jdisagg_recoveries_total", rung="replay")

    def pause() -> None:
        for victim in victims:
            victim.signal(signal.SIGSTOP)
        time.sleep(2.0)
        for victim in reversed(victims):
            victim.signal(signal.SIGCONT)
            time.sleep(0.05)

    def paused(_: int) -> tuple[float, float]:
        """The longest wait of a stream, and replays."""
        before = num_replays()
        strike = once_streaming(router, fleet.decode[0], pause)
        got = asyncio.run(interrupt(router.grpc, requests, 0.25, strike))
        assert_exact(got, wanted)
        return max(one.largest_gap_s for one in got), num_replays() - before

    gap_s, replays = fair(
        paused,
        lambda found: found[0] <= 1.5 or found[1] > 0,
        "the streams had ended when it paused, or one process stood still for longer than the others",
    )
    assert gap_s > 1.5, "nothing ran when it paused"
    assert replays == 0
    for victim in fleet.decode:
        wait_all_free(victim)


def test_killed_prefill_worker_is_survived_by_local_prefill(
    start: Start, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    requests = long_requests(20, seed=500, max_tokens=60)
    wanted = run_all(unified.grpc, requests)
    decode = kill_prefill_amid_handoffs(start, exact_flags, requests, wanted)
    assert decode.metric("jdisagg_recoveries_total", rung="local_prefill") > 0
    assert decode.metric("jdisagg_prefill_tokens_total", role="decode") > 0
    wait_all_free(decode)


def test_killed_client_frees_its_pages_at_once(pair: Pair, tmp_path: Path) -> None:
    """None of its requests goes on to the end, which is a second or two away."""
    script = tmp_path / "client.py"
    script.write_text(
        "from tests.e2e.client import run_all\n"
        "from tests.e2e.blows import long_requests\n"
        f"got = run_all({pair.decode.grpc!r}, long_requests(8, seed=900, max_tokens=180))\n"
        "assert all(one.error is None for one in got)\n"
    )

    def went_on(_: int) -> float:
        before = pair.decode.metric("jdisagg_requests_finished_total", reason="length")
        killed_s = _kill_client_while_it_runs(script, pair.decode)
        wait_all_free(pair.decode)
        wait_all_free(pair.prefill)
        print(f"\nkill -9 of the client: pages free after {time.monotonic() - killed_s:.2f} s")
        wait_until(lambda: not pair.decode.state()["streams"], LIMIT_S, "no stream is left", pair.decode.state)
        return pair.decode.metric("jdisagg_requests_finished_total", reason="length") - before

    assert fair(went_on, bool, "whoever kills the client, or hears that it is gone, waits for a core until the end") == 0


def _kill_client_while_it_runs(script: Path, decode: ServerProcess) -> float:
    """When it was killed."""
    client = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=environment())
    running = partial(decode.metric, "jdisagg_requests", state="running")
    try:
        wait_until(lambda: client.poll() is not None or running() > 0, 2 * LIMIT_S, "requests are running, or have ended")
    finally:
        client.kill()
        killed_s = time.monotonic()
        assert client.wait(LIMIT_S) in (-signal.SIGKILL, 0)  # 0: it had all of its answers
    return killed_s


def test_restarted_prefill_worker_joins_and_is_used(fleet: Fleet, unified: ServerProcess) -> None:
    [router] = fleet.routers
    requests = long_requests(4, seed=700, max_tokens=8)
    wanted = run_all(unified.grpc, requests)
    assert_exact(run_all(router.grpc, requests), wanted)
    assert_exact(run_all(fleet.decode[0].grpc, requests), wanted)  # a client of its own: with the router's prefill workers
    edges = (router, *fleet.decode)
    for edge in edges:
        wait_until(lambda edge=edge: edge.get("/ready")[0] == 200, LIMIT_S, f"{edge.flags[1]} is ready")
    fleet.prefill.pop().kill()
    for edge in edges:  # none of them can compute a prompt
        wait_until(lambda edge=edge: edge.get("/ready")[0] == 503, LIMIT_S, f"{edge.flags[1]} is not ready")
    # decode workers may find that one dead, and say so, before the router does and tells them that there is none
    wait_until(lambda: "no prefill worker that pairs with" in router.get("/ready")[1], LIMIT_S, "the router knows it")
    wait_until(lambda: "no router knows one" in fleet.decode[0].get("/ready")[1], LIMIT_S, "its router names none any more")
    wait_until(lambda: fleet.decode[0].metric("jdisagg_peers") == 0, LIMIT_S, "the engine's next tick counts no peer")
    fleet.add("prefill").wait_ready()
    fleet.wait_members()
    for edge in edges:
        wait_until(lambda edge=edge: edge.get("/ready")[0] == 200, LIMIT_S, f"{edge.flags[1]} is ready again")
    assert_exact(run_all(router.grpc, requests), wanted)
    assert_exact(run_all(fleet.decode[1].grpc, requests), wanted)


def test_two_static_prefill_workers_one_dead(start: Start, exact_flags: tuple[str, ...], unified: ServerProcess) -> None:
    prefill = start("prefill", "--role", "prefill", *exact_flags).wait_ready()
    nobody = f"127.0.0.1:{free_port()}"
    flags = ("--prefill", f"{nobody},{prefill.grpc}", "--local-prefill", "never", *PATIENT)
    decode = start("decode", "--role", "decode", *flags, *exact_flags).wait_ready()
    wait_until(lambda: decode.metric("jdisagg_peers", state="down") == 1, LIMIT_S, "one is known to be down")
    requests = long_requests(4, seed=800, max_tokens=8)
    assert_exact(run_all(decode.grpc, requests), run_all(unified.grpc, requests))
    assert decode.metric("jdisagg_peers", state="down") == 1
    assert decode.metric("jdisagg_peers", state="usable") == 1
    assert decode.metric("jdisagg_recoveries_total") == 0  # known to be down: nobody had to find out
    assert decode.log.read_text().count(f"prefill peer {nobody} is down") == 1


def test_a_prompt_moves_to_another_prefill_worker_while_the_first_is_quiet(
    start: Start, exact_flags: tuple[str, ...], unified: ServerProcess
) -> None:
    """The one that is asked first is frozen, and would be dead after five seconds only."""
    prefill = [start("prefill", "--role", "prefill", *exact_flags).wait_ready() for _ in range(2)]
    flags = ("--prefill", ",".join(worker.grpc for worker in prefill), "--local-prefill", "never", "--dead-after-s", "5")
    decode = start("decode", "--role", "decode", *flags, *exact_flags).wait_ready()
    requests = long_requests(1, seed=900, max_tokens=8)
    wanted = run_all(unified.grpc, requests)
    moves = (("jdisagg_prefill_hedges_total", {"outcome": "moved"}), ("jdisagg_recoveries_total", {"rung": "other_prefill"}))

    def moved(number: int) -> list[float]:
        if number > 1:
            time.sleep(2 * SUSPECT_S)
        got = run_all(decode.grpc, requests)
        assert_exact(got, wanted)
        [first] = [worker for worker in prefill if f"pid {worker.pid} " in str(got[0].complete)]
        before = [decode.metric(name, **labels) for name, labels in moves]
        first.signal(signal.SIGSTOP)
        assert_exact(run_all(decode.grpc, requests), wanted)
        found = [decode.metric(name, **labels) - was for (name, labels), was in zip(moves, before, strict=True)]
        first.signal(signal.SIGCONT)
        return found

    assert fair(moved, lambda found: not any(found), "D knew that the first is quiet before it was asked") == [1, 1]
