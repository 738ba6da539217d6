"""Which prefill workers a decode worker asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.requests import EngineRequest, SamplingParams
from jdisagg.roles.peer_choice import PeerChoice


class Peers:
    """All well, but `down`."""

    def __init__(self, *down: str) -> None:
        self._down = down

    def is_down(self, peer: str) -> bool:
        return peer in self._down

    def is_doubtful(self, peer: str) -> bool:
        return False


def choice(*down: str) -> PeerChoice:
    config = TransferConfig(local_prefill=LocalPrefill.ON_FAILURE)
    return PeerChoice(config, cast(Any, Peers(*down)), lambda: ("old", "new"))


def asked(*generated: int, peers: tuple[str, ...] = ("router's", "old")) -> EngineRequest:
    request = EngineRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9), deadline_s=1.0)
    return replace(request, generated_token_ids=generated, prefill_peers=peers)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (asked(), ("router's", "old")),
        (asked(peers=()), ("old", "new")),
        (asked(7), ("router's", "old", "new")),
    ],
)
def test_a_stream_that_has_begun_may_be_computed_by_who_has_come_since(
    request_: EngineRequest, wanted: tuple[str, ...]
) -> None:
    assert choice().of(request_) == wanted


def test_who_is_down_is_not_asked_where_it_can_be_computed_here() -> None:
    assert choice("router's").of(asked(7)) == ("old", "new")
