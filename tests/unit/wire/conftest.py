"""A tokenizer, and the ports of a P that D has to prove."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jdisagg.api.peer import ports as peer_ports
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.transfer.tcp_store import TcpStore
from tests.unit.ports import kept_port
from tests.unit.text.tiny_tokenizer import train_byte_level
from tests.unit.wire.tcp_ports import NOT_YET, Firewall


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(train_byte_level(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def store() -> Iterator[TcpStore]:
    made = TcpStore("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def refusing() -> Iterator[str]:
    with kept_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def patient_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs of ports have their time, however busy the machine is."""
    monkeypatch.setattr(peer_ports, "PATIENCE_S", NOT_YET)
    monkeypatch.setattr(peer_ports, "PROOF_TIMEOUT_S", 5.0)


@pytest.fixture
def firewall(monkeypatch: pytest.MonkeyPatch) -> Firewall:
    made = Firewall()
    monkeypatch.setattr(peer_ports, "_connect", made)
    return made
