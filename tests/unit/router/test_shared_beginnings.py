"""What many prompts begin with is computed on few workers, and does not keep them all on one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.router.fleet import Fleet
from jdisagg.router.flight import Flight
from jdisagg.router.placement import Placement
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.wire.rig import member, request

SYSTEM = tuple(range(200))  # tokens that all prompts begin with
FIRST = Output(request_id="any", token_ids=(1,))


@dataclass
class Desk:
    """Workers that take what they get: what is placed, and where."""

    fleet: Fleet
    live: list[Flight] = field(default_factory=list)
    num_asked: int = 0  # as the latest was told

    def __post_init__(self) -> None:
        self.placement = Placement(self)

    def submit(self, entry: object, asked: EngineRequest) -> None:
        assert entry is not None
        self.num_asked = asked.num_asked

    def cancel(self, entry: object, request_id: str, attempt: int, *, enough: bool) -> None:
        assert entry is not None

    def place(self, *parts: tuple[int, ...], salt: str = "") -> tuple[str, str]:
        """The decode and the prefill worker of a prompt of those parts."""
        flight = Flight(request(f"r/{len(self.live)}", prompt=sum(parts, ()), cache_salt=salt))
        self.placement.begin(flight)
        assert self.placement.place(flight, 0.0)
        self.live.append(flight)
        assert flight.entry is not None
        assert flight.prefill is not None
        return flight.entry.member.address, flight.prefill.entry.member.address

    def end_all(self) -> None:
        """Also their counts."""
        for flight in self.live:
            self.placement.heard(flight, FIRST)
            self.placement.leave(flight)
        self.live.clear()
        for entry in self.fleet.entries():
            assert (entry.pending, entry.pending_tokens, entry.pending_cached) == (0, 0, 0)


def desk(num_each: int = 4) -> Desk:
    fleet = idle_fleet(*(f"d{number}" for number in range(num_each)))
    for entry in fleet.entries():
        entry.member = member(entry.member, max_model_len=200_000)
        named = {"address": entry.member.address.replace("d", "p"), "role": Role.PREFILL}
        fleet.register(replace(entry.member, **named), 0.0)
    return Desk(fleet)


def document(number: int, num_tokens: int = 3000) -> tuple[int, ...]:
    return tuple(1000 * number + i % 997 for i in range(num_tokens))


def question(number: int) -> tuple[int, ...]:
    return (500_000 + number,) * 50


def test_documents_behind_one_system_prompt_are_spread_and_their_questions_meet_them() -> None:
    at = desk()
    homes: dict[int, tuple[str, str]] = {}
    for number in range(40):
        homes[number] = at.place(SYSTEM, document(number), question(number))
        at.end_all()
    for side in (0, 1):
        counts = Counter(home[side] for home in homes.values())
        assert len(counts) == 4
        assert min(counts.values()) >= 4, "nobody else was busy"
    for number in reversed(range(40)):
        assert at.place(SYSTEM, document(number), question(100 + number)) == homes[number]
        at.end_all()


def test_a_document_stays_where_it_is_in_a_busy_fleet() -> None:
    at = desk()
    homes = [at.place(SYSTEM, document(number), question(number)) for number in range(8)]
    assert {Counter(home[side] for home in homes)[f"{'dp'[side]}{i}"] for side in (0, 1) for i in range(4)} == {2}
    again = [at.place(SYSTEM, document(number), question(10 * turn + number)) for turn in range(1, 9) for number in range(8)]
    assert again == homes * 8, "also behind others that wait, as those compute little"
    at.end_all()


def test_a_prompt_that_all_have_spreads_over_everybody() -> None:
    at, hot = desk(16), document(0)
    places = [at.place(hot, question(number)) for number in range(200)]
    decodes, prefills = (Counter(place[side] for place in places) for side in (0, 1))
    assert len(decodes) == len(prefills) == 16
    assert max(decodes.values()) <= 20
    assert max(prefills.values()) <= 16
    at.end_all()


def test_branches_of_one_history_go_on_where_their_own_part_is() -> None:
    at, history = desk(), document(0, 2000)
    for _ in range(3):  # it becomes known everywhere
        for number in range(16):
            at.place(history, question(number))
        at.end_all()
    branches = [(history, document(number, 600)) for number in range(1, 5)]
    homes = [at.place(*branch) for branch in branches]
    at.end_all()
    assert [at.place(*branch, question(number)) for number, branch in enumerate(branches)] == homes


def test_another_salt_is_another_document() -> None:
    at = desk()
    homes = [{at.place(document(number), salt=salt) for salt in ("", "one", "two", "three")} for number in range(10)]
    assert max(len(home) for home in homes) >= 3


def test_who_takes_no_such_request_is_not_counted_among_those_that_are_asked() -> None:
    at = desk(6)
    draining, short, silent, gone, new, _ = (entry for entry in at.fleet.entries() if entry.member.decodes)
    at.place(document(0))
    assert at.num_asked == 6
    draining.member = replace(draining.member, draining=True)
    short.member = member(short.member, max_model_len=100)
    assert silent.stream is not None
    silent.stream.is_awaited = True
    gone.stream = None
    at.place(document(1))
    assert at.num_asked == 2
    new.member = member(new.member, fingerprint="new weights", needs_prefill=True)
    at.place(document(2))
    assert at.num_asked == 1, "nobody prefills for those"
    at.end_all()


@given(
    st.lists(st.tuples(st.sampled_from(["place", "place", "hear", "replay", "end", "restart", "drain"]), st.integers(0, 999)))
)
@settings(max_examples=60, deadline=None)
def test_whatever_becomes_of_requests_and_workers_nothing_stays_counted(history: list[tuple[str, int]]) -> None:
    at = desk(2)
    ever = at.fleet.entries()
    for position, (what, number) in enumerate(history):
        flight = at.live[number % len(at.live)] if at.live else None
        if what == "place":
            at.live.append(asked := Flight(request(f"r/{position}", prompt=document(number % 3) + question(number))))
            at.placement.begin(asked)
            at.placement.place(asked, 0.0)
        elif what in ("restart", "drain"):
            entry = at.fleet.entries()[number % 4]
            if what == "restart":
                at.fleet.remove(entry)
                at.fleet.register(replace(entry.member, epoch=f"epoch {number}", draining=False), 0.0)
            again = next(one for one in at.fleet.entries() if one.member.address == entry.member.address)
            again.member, again.stream = replace(again.member, draining=what == "drain" and number < 200), entry.stream
            ever.append(again)
        elif flight is not None and what == "hear":
            at.placement.heard(flight, FIRST)
        elif flight is not None and what == "replay":
            at.placement.leave(flight)
            flight.replay()
            at.placement.place(flight, 0.0)
        elif flight is not None:
            at.placement.leave(flight)
            at.live.remove(flight)
        assert all(0 <= entry.pending_cached <= entry.pending_tokens and entry.pending >= 0 for entry in ever)
    at.end_all()
    assert {(entry.pending, entry.pending_tokens, entry.pending_cached) for entry in ever} == {(0, 0, 0)}
