"""A prefill and some decode engines, real but for devices and transport, stepped by hand: no thread, no clock, no array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Lending
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.roles.decode import DecodeRole
from jdisagg.roles.inbox import Cancel, Inbox, Submit
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.kv_lending import KVLending
from jdisagg.roles.prefill import PrefillRole
from jdisagg.transfer.choice import PublisherSet
from tests.unit.roles.engine import Engine
from tests.unit.roles.network_fake import BYTES_PER_TOKEN, CHUNK_TOKENS, PEERS, FakeFetcher, FakePublisher, Network, Wire
from tests.unit.sched.content_fake import EOS
from tests.unit.sched.engine_fake import request

PROMPT = tuple(range(3, 22))  # 19 tokens


@dataclass
class Decoder:
    """A decode worker with its parts at hand."""

    engine: Engine
    wire: Wire
    handoffs: DecodeSide
    lent: FakePublisher
    lender: Lender
    role: DecodeRole

    @property
    def is_done(self) -> bool:
        """It serves nobody."""
        assert self.engine.loop is not None
        return self.engine.loop.num_unfinished == 0 and not self.wire.open_streams

    def assert_quiescent(self) -> None:
        """Its ledgers are empty."""
        assert self.handoffs.is_idle, self.handoffs.snapshot()
        assert self.lent.num_buffered_bytes == 0
        assert self.lender.is_idle, self.lender.snapshot()
        assert not self.wire.open_streams
        assert self.engine.loop is not None
        assert self.engine.loop.snapshot()["handoff"]["asked_tokens"] == {}
        assert remembered(self.role, self.role._provenance, self.role._hidden) == []


def remembered(*parts: Any) -> list[str]:
    """What they still hold of requests that are over: it would grow for ever, and pieces that nobody imports are memory."""
    held = [(part, name, value) for part in parts for name, value in vars(part).items() if isinstance(value, dict | set | list)]
    known = ("_publishers", "_avoided")  # by name of their backend; decode workers of which no KV came, for half a minute
    return [f"{type(part).__name__}.{name}: {value}" for part, name, value in held if value and name not in known]


def make_decoder(
    network: Network,
    prefill: Inbox,
    config: TransferConfig,
    *,
    number: int,
    dtype: str,
    slow_request_s: float,
    clock: Callable[[], float],
    **engine: Any,
) -> Decoder:
    """Decode worker `number`, which gets its KV from the worker behind `prefill`."""
    decode = Engine(Role.DECODE, local_prefill=config.local_prefill is not LocalPrefill.NEVER, **engine)
    wire = Wire(prefill, decode.inbox, number=number)
    handoffs = DecodeSide(config, chunk_bytes_per_token=BYTES_PER_TOKEN, backend="fake", eos_token_ids=(EOS,))
    lent, lender = FakePublisher(network, decode.inbox), Lender(config, bytes_per_token=BYTES_PER_TOKEN)
    role = DecodeRole(
        config=config,
        scheduler=decode.scheduler,
        handoffs=handoffs,
        runner=decode.runner,
        peers=wire,
        fetcher=FakeFetcher(network, decode.inbox),
        streams=decode.streams,
        metrics=decode.metrics,
        known_peers=lambda is_shunned: PEERS,
        page_size=4,
        lending=KVLending(
            lender, Lending(address=wire.name, backend="fake", dtype=dtype), scheduler=decode.scheduler,
            runner=decode.runner, publisher=lent, metrics=decode.metrics,
        ),
    )  # fmt: skip
    decode.run(role, slow_request_s=slow_request_s, clock=clock)
    return Decoder(decode, wire, handoffs, lent, lender, role)


class World:
    """All engines and what clients have got."""

    def __init__(
        self,
        *,
        local_prefill: bool = True,
        below_tokens: int = 0,
        buffer_bytes: int = 96,
        decode_pages: int = 24,
        prefill_pages: int = 24,
        prefill_page_size: int = 4,
        slow_request_s: float = inf,
        want_min_tokens: int = 0,
        dtypes: tuple[str, str] = ("float32", "float32"),
        num_decode: int = 1,
        backends: tuple[str, ...] = ("fake",),
        clock: Callable[[], float] | None = None,
        **decode: Any,
    ) -> None:
        """`below_tokens`: prompts of fewer never leave D. `dtypes`: of P's and of D's KV, as they say; `want_min_tokens` 0: D
        lends and P never asks; `backends`: of P, best first; `clock` None: no time passes within a tick; `decode`: settings of
        the decode engines."""
        clock = clock or (lambda: self.now_s)
        policy = LocalPrefill.ON_FAILURE if local_prefill else LocalPrefill.NEVER
        config = TransferConfig(
            transfer_chunk_tokens=CHUNK_TOKENS,
            transfer_buffer_bytes=buffer_bytes,
            local_prefill=LocalPrefill.BELOW_TOKENS if below_tokens else policy,
            local_prefill_below_tokens=below_tokens,
        )
        self.now_s = 0.0
        self.network = Network()
        self.prefill = Engine(Role.PREFILL, prefill_pages, local_prefill=True, page_size=prefill_page_size)
        self.prefill.runner.meanwhile = self.network.step
        self.outputs: dict[str, list[Output]] = {}
        self.homes: dict[str, int] = {}  # which decode worker serves whom
        self.publishers = [FakePublisher(self.network, self.prefill.inbox, name) for name in backends]
        self.borrower = Borrower(config, bytes_per_token=BYTES_PER_TOKEN)
        self.borrowing = KVBorrowing(
            self.borrower, min_tokens=want_min_tokens, page_size=prefill_page_size, dtype=dtypes[0],
            scheduler=self.prefill.scheduler, runner=self.prefill.runner, metrics=self.prefill.metrics,
            fetcher=FakeFetcher(self.network, self.prefill.inbox, to_prefill=True),
        )  # fmt: skip
        self.prefill_role = PrefillRole(
            scheduler=self.prefill.scheduler,
            handoffs=PrefillSide(config, bytes_per_token=BYTES_PER_TOKEN),
            runner=self.prefill.runner,
            publishers=PublisherSet(self.publishers),
            metrics=self.prefill.metrics,
            worker="p0",
            slow_request_s=slow_request_s,
            borrowing=self.borrowing,
        )
        self.prefill.run(self.prefill_role, clock=clock)
        self._make_decoder: Callable[[int], Decoder] = lambda number: make_decoder(
            self.network, self.prefill.inbox, config, number=number, num_pages=decode_pages, dtype=dtypes[1],
            slow_request_s=slow_request_s, clock=clock, **decode,
        )  # fmt: skip
        self.decoders = [self._make_decoder(number) for number in range(num_decode)]

    @property
    def decode(self) -> Engine:
        """The first decode worker, most often the only one."""
        return self.decoders[0].engine

    @property
    def wire(self) -> Wire:
        """Its streams."""
        return self.decoders[0].wire

    @property
    def handoffs(self) -> DecodeSide:
        """Its hand-offs."""
        return self.decoders[0].handoffs

    @property
    def lent(self) -> FakePublisher:
        """What it lends."""
        return self.decoders[0].lent

    @property
    def lender(self) -> Lender:
        """Its ledger of that."""
        return self.decoders[0].lender

    def submit(self, request: EngineRequest, to: int = 0) -> None:
        """A client's request to a decode worker."""
        self.outputs.setdefault(request.request_id, [])
        self.homes[request.request_id] = to
        self.decoders[to].engine.inbox.post(Submit(replace(request, attempt=0), self._take))

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            mine = self.outputs.get(output.request_id)
            assert mine is not None, f"an output for {output.request_id}, which nobody asked for"
            mine.append(output)

    def cancel(self, request_id: str) -> None:
        self.decoders[self.homes[request_id]].engine.inbox.post(Cancel(request_id, 0))

    def kill(self, number: int) -> list[str]:
        """A decode worker dies and comes back empty; returns what it served, over or not."""
        self.decoders[number].wire.vanish()
        self.decoders[number] = self._make_decoder(number)
        return [request_id for request_id, home in self.homes.items() if home == number]

    def tick(self) -> bool:
        """Everything once; False when nothing happened anywhere."""
        moved = self.network.step()
        self.now_s += 0.01
        return any([moved, self.prefill.tick(self.now_s), *(d.engine.tick(self.now_s) for d in self.decoders)])

    def settle(self, max_ticks: int = 4000) -> None:
        """Run until nobody has anything to do, time passing quickly once nothing moves."""
        quiet = 0
        for _ in range(max_ticks):
            quiet = 0 if self.tick() else quiet + 1
            if quiet > 3:
                if all(decoder.is_done for decoder in self.decoders):
                    break
                self.now_s += 0.5
        self.assert_quiescent()

    def tokens(self, request_id: str) -> list[int]:
        """All tokens a client got, in order."""
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def text(self) -> str:
        """All ledgers, for a failure."""
        parts = {"P": self.prefill.loop} | {decoder.wire.name: decoder.engine.loop for decoder in self.decoders}
        return "\n".join(f"{name}: {loop.snapshot() if loop else None}" for name, loop in parts.items())

    def assert_quiescent(self) -> None:
        """Nothing is left anywhere."""
        for engine in (self.prefill, *(decoder.engine for decoder in self.decoders)):
            assert engine.scheduler.is_idle(), self.text()
            assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
            assert len(engine.streams) == 0
            assert not engine.runner.device.slots, "the device still holds a slot"
            assert not engine.runner.device.host, "a host copy is left"
        for decoder in self.decoders:
            decoder.assert_quiescent()
        assert [publisher.num_buffered_bytes for publisher in self.publishers] == [0] * len(self.publishers)
        assert self.borrower.is_idle, self.borrower.snapshot()
        role = self.prefill_role
        assert remembered(role, role._publishers, role._handoffs._full_pool, self.borrowing) == []
        assert not role._shares._receivers


def two_full_pools() -> World:
    """A (prompt 1 to 20) holds pages of D and has lost its stream; B (2 to 30), computed, fills P's pool and waits for D's."""
    world = World(local_prefill=False, decode_pages=10, prefill_pages=10)
    world.submit(request("a", tuple(range(1, 21)), 4))
    world.submit(request("b", tuple(range(2, 31)), 4))
    for _ in range(4):
        world.prefill.tick(world.now_s)
        world.decode.tick(world.now_s)
    (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "a"]
    world.wire.cut(stream, "dead")
    return world
