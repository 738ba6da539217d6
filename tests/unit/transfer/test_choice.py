"""Which backend moves a hand-off's pieces."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.handoff.messages import HandoffId
from jdisagg.transfer.base import PieceFailed, TransferEvent
from jdisagg.transfer.choice import FetcherSet, PublisherSet
from tests.unit.transfer.fake import FakeFetcher, FakeNetwork, FakePublisher
from tests.unit.transfer.rig import TARGET, H, piece, tokens

H2 = HandoffId("other", 2)


def publishers(post: list[TransferEvent]) -> tuple[PublisherSet, dict[str, FakeNetwork]]:
    networks = {name: FakeNetwork() for name in ("one", "two")}
    made = []
    for name, network in networks.items():
        publisher = FakePublisher(network, post.append)
        publisher.name = name
        made.append(publisher)
    return PublisherSet(made), networks


def test_pieces_go_over_the_receivers_first_choice_that_is_here() -> None:
    chosen, networks = publishers([])
    assert chosen.open(H, ("elsewhere", "two", "one"))
    chosen.publish(H, "k", piece(tokens(3)))
    networks["two"].run()
    assert list(networks["two"].pieces) == ["k"]
    assert chosen.num_buffered_bytes > 0
    chosen.discard("k")
    chosen.discard("k")
    assert (chosen.num_buffered_bytes, networks["two"].pieces) == (0, {})
    assert not chosen.open(H2, ("elsewhere",))
    assert chosen.open(H2, ()), "a receiver that names none gets the first"


def test_a_backend_that_failed_a_handoff_is_left_and_one_asked_for_is_taken() -> None:
    chosen, networks = publishers([])
    chosen.open(H, ("one", "two"))
    chosen.open(H2, ("one", "two"))
    assert chosen.move_off(H, "two") is None, "it is not in use"
    assert chosen.move_off(H, "one") == "two"
    assert chosen.move_off(H, "two") is None, "the last one stays"
    chosen.prefer(H2, "elsewhere")
    chosen.publish(H2, "b", piece(tokens(3)))
    chosen.prefer(H2, "two")
    for handoff, key in ((H, "a"), (H2, "c")):
        chosen.publish(handoff, key, piece(tokens(3)))
    for network in networks.values():
        network.run()
    assert (sorted(networks["one"].pieces), sorted(networks["two"].pieces)) == (["b"], ["a", "c"])
    for key in "abc":
        chosen.discard(key)
    chosen.forget(H)
    chosen.forget(H)
    assert chosen.move_off(H, "one") is None


def test_a_piece_is_fetched_over_the_backend_it_names_and_an_unknown_one_fails_at_once() -> None:
    events: list[TransferEvent] = []
    network = FakeNetwork()
    fetchers = FetcherSet([FakeFetcher(network, TARGET, events.append)], events.append)
    publisher = FakePublisher(network, events.append)
    publisher.publish(H, "k", piece(tokens(3)))
    network.run()
    ready = events.pop().ready  # pyright: ignore[reportAttributeAccessIssue]
    for backend in ("fake", ""):
        fetchers.fetch(H, "peer", replace(ready, backend=backend), 1e9)
        network.run()
        assert type(events.pop()).__name__ == "PieceArrived"
    strange = replace(ready, backend="strange")
    fetchers.fetch(H, "peer", strange, 1e9)
    failed = events.pop()
    assert isinstance(failed, PieceFailed)
    assert failed.reason == "connection"
    assert "wanted one of fake" in failed.detail
