"""A pool that is always full, for a while: everybody ends with exactly the right tokens, nobody starves, nothing is left over.

JDISAGG_SOAK_S: seconds of load for each kind of server, 8 by default.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from chaos_kit.leaks import Held

from tests.e2e.blows import assert_quiescent
from tests.e2e.client import Asked, Got, run_all
from tests.e2e.conftest import PATIENT, Start, starting
from tests.e2e.overtaking import Story, read_story
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.soak_load import Fate, Outcome, flood, make_catalogue

SOAK_S = float(os.environ.get("JDISAGG_SOAK_S", "8"))
LONG_S = 250.0  # from here on every rare thing must have happened often
WARM_UP_S = 3.0
POOL_PAGES, PAGE_SIZE = 25, 16  # page 0 is never used
MOST_TOKENS = (POOL_PAGES - 1) * PAGE_SIZE  # of one request: the whole pool
MAX_BYPASS = 4
SIZES = (
    *("--max-model-len", str(MOST_TOKENS), "--page-size", str(PAGE_SIZE), "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "64", "--transfer-chunk-tokens", "64", "--numerics", "exact"),
)
TIGHT = (
    *("--num-pages", str(POOL_PAGES), "--enable-kv-events"),
    *("--scheduling-policy", "priority", "--priority-aging-s", "2", "--max-bypass", str(MAX_BYPASS)),
)
DECODING = ("--num-scheduler-steps", "4", "--reserved-decode-tokens", "8", "--host-kv-bytes", "64MiB")
pytestmark = pytest.mark.timeout(600 + 4 * SOAK_S)


@pytest.fixture(scope="module")
def catalogue() -> list[Asked]:
    return make_catalogue(min(600, int(60 + SOAK_S)), vocab_size=1024, most_tokens=MOST_TOKENS)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, catalogue: list[Asked]) -> list[Got]:
    """What each entry gets from a server with room for all and no cache."""
    flags = ("--model", str(tiny_model), *SIZES, "--num-pages", "400", "--no-enable-prefix-caching")
    with starting(tmp_path_factory.mktemp("roomy")) as start:
        server = start("roomy", "--role", "unified", *flags).wait_ready()
        got = run_all(server.grpc, catalogue, at_once=8, timeout_s=120 + SOAK_S)
        server.stop()
    assert all(one.error is None for one in got), [one.error for one in got if one.error][:1]
    assert len({token for one in got for choice in one.tokens.values() for token in choice}) > 300
    return got


@pytest.mark.covers("D24", "H10")
def test_a_full_unified_server_starves_nobody_and_leaks_nothing(
    start: Start, tiny_model: Path, tmp_path: Path, catalogue: list[Asked], wanted: list[Got]
) -> None:
    log = tmp_path / "unified.jsonl"
    flags = ("--model", str(tiny_model), *SIZES, *TIGHT, *DECODING, "--schedule-log", str(log))
    server = start("tight", "--role", "unified", *flags).wait_ready()
    soak(server, [server], catalogue, wanted)
    assert server.stop() == 0
    assert_bounds([report(log)])


@pytest.mark.covers("D24", "V23")
def test_a_full_pair_starves_nobody_and_leaks_nothing(
    start: Start, tiny_model: Path, tmp_path: Path, catalogue: list[Asked], wanted: list[Got]
) -> None:
    logs = [tmp_path / "prefill.jsonl", tmp_path / "decode.jsonl"]
    flags = ("--model", str(tiny_model), *SIZES, *TIGHT, *PATIENT)
    prefill = start("prefill", "--role", "prefill", *flags, "--num-pages", "49", "--schedule-log", str(logs[0])).wait_ready()
    peer = ("--prefill", prefill.grpc, "--local-prefill", "never")
    decode = start(
        "decode", "--role", "decode", *flags, *DECODING, *peer, "--max-num-seqs", "3", "--schedule-log", str(logs[1])
    ).wait_ready()
    soak(decode, [prefill, decode], catalogue, wanted)
    assert decode.metric("jdisagg_prefill_tokens_total", role="decode") == 0
    assert decode.stop() == 0
    assert prefill.stop() == 0
    reports = [report(log) for log in logs]
    assert_bounds(reports)


def soak(edge: ServerProcess, servers: list[ServerProcess], catalogue: list[Asked], wanted: list[Got]) -> None:
    """Load `edge`, and look at all servers before and after."""
    flood(edge, catalogue, seed=1, seconds=WARM_UP_S)
    before = [assert_at_rest(server) for server in servers]
    outcomes = flood(edge, catalogue, seed=2, seconds=SOAK_S)
    print(f"\n{edge.flags[1]}: {outcomes_text(outcomes)}")
    for server, was in zip(servers, before, strict=True):
        assert_at_rest(server)
        if len(servers) > 1:  # once D has lent KV to P, P keeps a connection to it, and a thread; D has the other end
            was = replace(was, threads=was.threads + 1, descriptors=was.descriptors + 1, sockets=was.sockets + 1)
        wait_until(lambda s=server, w=was: s.held().no_more_than(w), 30, f"{server.flags[1]}: no more than {was}", server.held)
        print(f"  {server.flags[1]}: {was} -> {server.held()}; host time per step {host_time_text(server)}")
        print(f"  {server.state()['scheduler']['stats']}")
        assert server.metric("jdisagg_compiles_after_ready_total") == 0
    for outcome in outcomes:
        check_outcome(outcome, wanted[outcome.visit.entry])


def assert_at_rest(server: ServerProcess) -> Held:
    """Nothing is held for anybody; returns what the process itself holds."""
    assert_quiescent(server)
    return server.held()


def check_outcome(outcome: Outcome, wanted: Got) -> None:
    """Well ended: exactly the tokens of the reference. Otherwise: those that came are its first ones."""
    visit = outcome.visit
    what = (visit, outcome.error)
    if visit.fate is Fate.HURRIES and outcome.error is not None:
        assert "DEADLINE_EXCEEDED" in outcome.error or "its deadline is in" in outcome.error, what  # too late, or it would be
    elif not outcome.went_away:
        assert outcome.error is None, what
    for choice, tokens in outcome.tokens.items():
        assert tokens == wanted.tokens[choice][: len(tokens)], what
    if outcome.error is None and not outcome.went_away:
        assert outcome.tokens == wanted.tokens, what
        assert outcome.finish == wanted.finish, what


def outcomes_text(outcomes: list[Outcome]) -> str:
    ends = Counter("away" if o.went_away else "well" if o.error is None else o.error.split(":")[0] for o in outcomes)
    tokens = sum(len(tokens) for o in outcomes for tokens in o.tokens.values())
    return f"{len(outcomes)} requests {dict(ends)}, {tokens} tokens, longest {max(o.seconds for o in outcomes):.2f} s"


def host_time_text(server: ServerProcess) -> str:
    """P99 and maximum, as bounds of the histogram's buckets, of everything a tick does but wait for the device."""
    pattern = r'^jdisagg_host_overhead_seconds_bucket\{le="([^"]+)"\} (\S+)$'
    buckets = [(float(le), float(count)) for le, count in re.findall(pattern, server.get("/metrics")[1], re.M)]
    total = buckets[-1][1]
    p99, most = (next(le for le, count in buckets if count >= share * total) for share in (0.99, 1.0))
    beyond = total - buckets[-2][1]  # steps longer than the last bound
    longest = f"{beyond:.0f} steps > {buckets[-2][0] * 1e3:g} ms" if beyond else f"max <= {most * 1e3:g} ms"
    return f"p99 <= {p99 * 1e3:g} ms, {longest} ({total:.0f} steps)"


def report(log: Path) -> Story:
    story = read_story(log)
    print(f"\n{log.stem}: {story.text()}")
    return story


def assert_bounds(stories: list[Story]) -> None:
    """The stated bound, for every request; and everything that a full pool brings about has happened."""
    for story in stories:
        assert not story.broken, story.broken[:3]
        for life in story.lives:
            assert life.num_passed <= MAX_BYPASS, life
            assert life.num_passed_preempted == 0, life
    plans = sum((story.plans for story in stories), Counter[str]())
    least = 100 if SOAK_S >= LONG_S else 0
    for what in ("lost pages", "offloads", "restores", "forks", "multi-step"):
        assert plans[what] > least, (what, plans)
