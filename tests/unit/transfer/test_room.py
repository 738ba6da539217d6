"""What of a piece stays on the device, and that one that is given up while its bytes are made leaves none."""

from __future__ import annotations

import threading

import pytest

from jdisagg.transfer import host_backend
from jdisagg.transfer.base import Piece, Published
from tests.unit.transfer.rig import H, Rig, piece, tokens


@pytest.mark.parametrize(("kind", "stays_tokens"), [("grpc", (0, 0)), ("tcp", (0, 0)), ("shm", (0, 0)), ("jax", (1, 8))])
def test_what_of_a_piece_stays_on_the_device_is_told(kind: str, stays_tokens: tuple[int, int]) -> None:
    """Over "jax" it is padded: five tokens are as many as eight."""
    rig = Rig(kind).start()
    for key, num_tokens, wanted in zip("ab", (1, 5), stays_tokens, strict=True):
        rig.publisher.publish(H, key, piece(tokens(num_tokens)))
        published = rig.event()
        assert isinstance(published, Published)
        assert published.stays_tokens == wanted
    rig.close()


def test_a_piece_discarded_while_its_bytes_are_made_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("grpc").start()
    packing, discarded, pack = threading.Event(), threading.Event(), host_backend.pack

    def slow_pack(sent: Piece) -> memoryview:
        packing.set()
        assert discarded.wait(30.0)
        return pack(sent)

    monkeypatch.setattr(host_backend, "pack", slow_pack)
    rig.publisher.publish(H, "k", piece(tokens(5)))
    assert packing.wait(30.0)
    rig.publisher.discard("k")
    discarded.set()
    ready = rig.published("next", piece(tokens(5)))
    assert ready.key == "next", "nothing is said of the first one"
    assert rig.store.get("k") is None
    assert rig.publisher.num_buffered_bytes == ready.num_bytes
    rig.close()
