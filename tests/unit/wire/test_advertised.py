"""What other machines are told about a server's address."""

import socket

import pytest

from jdisagg.api.channels import advertised


@pytest.mark.parametrize(
    ("bound", "advertise_host", "wanted"),
    [
        ("127.0.0.1:9000", None, "127.0.0.1:9000"),
        ("0.0.0.0:9000", None, f"{socket.gethostname()}:9000"),
        ("[::]:9000", None, f"{socket.gethostname()}:9000"),
        ("0.0.0.0:9000", "10.1.2.3", "10.1.2.3:9000"),
        ("[::1]:9000", None, "[::1]:9000"),
        ("0.0.0.0:9000", "fd00::7", "[fd00::7]:9000"),
    ],
)
def test_wildcard_addresses_are_never_advertised(bound: str, advertise_host: str | None, wanted: str) -> None:
    assert advertised(bound, advertise_host) == wanted


def test_where_something_forwards_its_port_is_named() -> None:
    assert advertised("127.0.0.1:9000", None, 9443) == "127.0.0.1:9443"
