"""The second turn of a chat over two processes: P fetches from D what D alone has, and each way only missing tokens travel."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import grpc
import pytest
from fleet_process import free_port

from jdisagg.v1 import admin_pb2, admin_pb2_grpc
from tests.e2e.client import OPTIONS, Asked, Got, run_all
from tests.e2e.conftest import PATIENT, Start, starting
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, make_tiny_model
from tests.e2e.tries import fair

BYTES_PER_TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
PAGE_P, PAGE_D, CHUNK = 16, 32, 64
PROMPT_TOKENS, ANSWER_TOKENS = 1700, 220
SIZES = (
    *("--max-model-len", "2304", "--num-pages", "500", "--max-num-seqs", "4", "--max-num-batched-tokens", "128"),
    *("--transfer-chunk-tokens", str(CHUNK), "--numerics", "exact", *PATIENT),
)
LIMIT_S = 30.0  # of what takes a second
HOOKS = {"JDISAGG_TEST_HOOKS": "1"}


class Chat:
    """One prefill and one decode process with unlike page sizes, both with prefix caches, and conversations with them."""

    def __init__(self, start: Start, model: Path, *, local_prefill: str = "never") -> None:
        self._start = start
        self._port = free_port()
        self._flags = ("--model", str(model), *SIZES)
        self.prefill = self.start_prefill()
        peer = ("--prefill", self.prefill.grpc, "--local-prefill", local_prefill, "--page-size", str(PAGE_D))
        self.decode = start("decode", "--role", "decode", *peer, *self._flags, env=HOOKS).wait_ready()

    def start_prefill(self) -> ServerProcess:
        """At the same port every time."""
        own = ("--grpc-port", str(self._port), "--page-size", str(PAGE_P))
        return self._start("prefill", "--role", "prefill", *own, *self._flags, env=HOOKS).wait_ready()

    def restart_prefill(self) -> None:
        """The new one asks a D again that has failed the old one."""
        self.prefill.kill()
        self.prefill = self.start_prefill()
        wait_until(lambda: self.decode.get("/ready")[0] == 200, LIMIT_S, "D knows the new P")

    def num_given_up(self) -> float:
        """Borrowings that P has ended before everything was there."""
        name = "jdisagg_borrowings_total"
        return self.prefill.metric(name) - self.prefill.metric(name, outcome="complete")

    def moved(self) -> tuple[int, int, int]:
        """So far: bytes from P to D, from D to P, and prompt tokens computed by P."""
        down = self.decode.metric("jdisagg_transfer_bytes_total")
        up = self.prefill.metric("jdisagg_transfer_bytes_total")
        return int(down), int(up), int(self.prefill.metric("jdisagg_prefill_tokens_total"))

    def reset_caches(self) -> None:
        """Nobody remembers anything."""
        for server in (self.prefill, self.decode):
            with grpc.insecure_channel(server.grpc, options=OPTIONS) as channel:
                admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=20)

    def is_empty(self) -> bool:
        """No request, lease, or published byte anywhere."""
        return not (self.prefill.left_over() or self.decode.left_over())


def ask(chat: Chat, prompt: tuple[int, ...], max_tokens: int) -> Got:
    """One request to its end."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    (got,) = run_all(chat.decode.grpc, [Asked(prompt=prompt, sampling=sampling)])
    assert got.error is None, got.error
    assert got.complete is not None
    return got


def conversation(chat: Chat, seed: int) -> tuple[int, ...]:
    """Serve a first turn; returns the prompt of the second."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(16, 1024) for _ in range(PROMPT_TOKENS))
    answer = ask(chat, prompt, ANSWER_TOKENS).tokens[0]
    return (*prompt, *answer, *(rng.randrange(16, 1024) for _ in range(37)))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("long") / "tiny", max_model_len=2304)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Chat]:
    with starting(tmp_path_factory.mktemp("chat")) as start:
        yield Chat(start, long_model)


def test_second_turn_of_a_chat_moves_only_missing_tokens_each_way(chat: Chat) -> None:
    def second_turn(number: int) -> tuple[tuple[int, ...], Got, list[int], float]:
        """Its prompt and answer, what moved, and how often P gave up asking D."""
        if number > 1:
            chat.restart_prefill()
        prompt = conversation(chat, 99 + number)
        before, stalled = chat.moved(), chat.prefill.metric("jdisagg_borrowings_total", outcome="stalled")
        got = ask(chat, prompt, 16)
        moved = [now - then for now, then in zip(chat.moved(), before, strict=True)]
        return prompt, got, moved, chat.prefill.metric("jdisagg_borrowings_total", outcome="stalled") - stalled

    prompt, got, (down, up, computed), _ = fair(second_turn, itemgetter(3), "a D that stands still for a second lends nothing")
    cached = PROMPT_TOKENS // PAGE_P * PAGE_P
    held = (PROMPT_TOKENS + ANSWER_TOKENS - 1) // PAGE_D * PAGE_D
    missing = len(prompt) - held
    print(f"\nsecond turn of {len(prompt)} tokens: D -> P {up} bytes, P -> D {down} bytes, {computed} tokens computed")
    assert (up, down) == ((held - cached) * BYTES_PER_TOKEN, missing * BYTES_PER_TOKEN)
    assert computed == missing
    assert got.complete is not None
    assert got.complete.usage.cached_tokens == held
    provenance = got.complete.choices[0].provenance
    assert (provenance.transferred_bytes, provenance.borrowed_bytes) == (down, up)
    assert (provenance.prefilled_tokens, provenance.borrowed_tokens) == (missing, held - cached)
    wait_until(chat.is_empty, LIMIT_S, "nothing left")
    chat.reset_caches()
    assert ask(chat, prompt, 16).essence() == got.essence(), "the same as without any cache"
    assert chat.prefill.metric("jdisagg_compiles_after_ready_total") == 0
    assert chat.decode.metric("jdisagg_compiles_after_ready_total") == 0


@pytest.mark.covers("C02")
def test_a_long_prompt_travels_while_it_is_computed(chat: Chat) -> None:
    share = fair(
        lambda number: hidden_share(chat, random.Random(4 + number)),
        lambda share: share <= 0.5,
        "a D that stands still fetches later",
    )
    assert share > 0.5, "nearly all pieces are ready before the last chunk"


def hidden_share(chat: Chat, rng: random.Random) -> float:
    """Of the transfer of one prompt, what happened while P computed."""
    names = ("jdisagg_transfer_hidden_seconds_total", "jdisagg_transfer_seconds_sum", "jdisagg_transfer_bytes_total")
    before = [chat.decode.metric(name) for name in names]
    ask(chat, tuple(rng.randrange(16, 1024) for _ in range(PROMPT_TOKENS)), 2)
    hidden_s, total_s, num_bytes = (chat.decode.metric(name) - then for name, then in zip(names, before, strict=True))
    print(f"\n{PROMPT_TOKENS} tokens: {hidden_s / total_s:.0%} of {total_s * 1e3:.0f} ms of transfer hidden behind prefill")
    assert num_bytes == PROMPT_TOKENS * BYTES_PER_TOKEN
    assert 0 < hidden_s < total_s or hidden_s == pytest.approx(total_s)
    return hidden_s / total_s


def freeze(server: ServerProcess) -> None:
    """Its engine stands still; the process lives and sends heartbeats."""
    server.signal(signal.SIGUSR2)
    wait_until(lambda: "error" in server.state_now(), LIMIT_S, "the engine stands still")


def thaw(server: ServerProcess) -> None:
    """It goes on."""
    server.signal(signal.SIGUSR2)


class Wanting:
    """A second turn at the point where P has asked D, whose engine stands still, for what it lacks."""

    def __init__(self, chat: Chat, seed: int, pool: ThreadPoolExecutor) -> None:
        self.prompt = conversation(chat, seed)
        given_up = chat.num_given_up()
        freeze(chat.prefill)  # the stream opens and is not read
        self.answer: Future[Got] = pool.submit(ask, chat, self.prompt, 16)
        wait_until(lambda: chat.decode.state()["handoff"]["handoffs"], LIMIT_S, "D has opened its stream")
        freeze(chat.decode)
        thaw(chat.prefill)

        def p_has_asked() -> bool:
            """It does, or did and gave up before anybody looked."""
            return bool(chat.prefill.state()["handoff"]["borrowing"]) or chat.num_given_up() > given_up

        wait_until(p_has_asked, LIMIT_S, "P wants KV of D")

    def expected(self, chat: Chat) -> tuple[object, ...]:
        """What the answer is without any cache."""
        chat.reset_caches()
        return ask(chat, self.prompt, 16).essence()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_receiver_that_does_not_answer_costs_a_second(chat: Chat, pool: ThreadPoolExecutor) -> None:
    stalled = chat.prefill.metric("jdisagg_borrowings_total", outcome="stalled")
    wanting = Wanting(chat, 2, pool)
    before = chat.prefill.metric("jdisagg_transfer_bytes_total")
    began_s = time.monotonic()
    wait_until(lambda: not chat.prefill.state()["handoff"]["borrowing"], LIMIT_S, "P computes")
    waited_s = time.monotonic() - began_s
    thaw(chat.decode)
    got = wanting.answer.result(100)
    print(f"\nP gave up asking after {waited_s:.2f} s")
    assert "no piece for" in chat.prefill.log_since_ready(), "by the second without one, not by all of its time"
    assert chat.prefill.metric("jdisagg_transfer_bytes_total") == before, "nothing came from D"
    assert chat.prefill.metric("jdisagg_borrowings_total", outcome="stalled") == stalled + 1
    wait_until(chat.is_empty, LIMIT_S, "what D published too late is gone")
    assert wanting.expected(chat) == got.essence()


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Chat]:
    """Processes to kill; D may compute prompts when its only peer is gone."""
    with starting(tmp_path_factory.mktemp("mortal")) as start:
        yield Chat(start, long_model, local_prefill="on-failure")


@pytest.mark.covers("X22")
def test_p_killed_while_it_borrows(mortal: Chat, pool: ThreadPoolExecutor) -> None:
    wanting = Wanting(mortal, 3, pool)
    mortal.prefill.kill()
    thaw(mortal.decode)
    got = wanting.answer.result(100)
    wait_until(lambda: not mortal.decode.metric("jdisagg_kv_pages_used"), LIMIT_S, "D is empty")
    wait_until(lambda: not mortal.decode.state()["handoff"]["lending"], LIMIT_S, "D lends nothing")
    wait_until(lambda: mortal.decode.metric("jdisagg_published_bytes") == 0, LIMIT_S, "D has nothing published")
    mortal.prefill = mortal.start_prefill()
    assert wanting.expected(mortal) == got.essence()


def test_d_killed_while_it_lends(mortal: Chat, pool: ThreadPoolExecutor) -> None:
    wanting = Wanting(mortal, 4, pool)
    mortal.decode.kill()
    assert wanting.answer.exception(100) is not None, "its only D is gone"
    wait_until(lambda: not mortal.prefill.state()["handoff"]["handoffs"], LIMIT_S, "P has let go")

    def held() -> list[object]:
        state = mortal.prefill.state()["handoff"]
        return [part for name in ("borrowing", "buffered_bytes", "replies") if (part := state[name])]

    wait_until(lambda: not held(), LIMIT_S, "P holds nothing", held)
    wait_until(lambda: not mortal.prefill.metric("jdisagg_kv_pages_used"), LIMIT_S, "P is empty")
