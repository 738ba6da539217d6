"""The prefix index: longest match, whole pages, salts, eviction."""

from __future__ import annotations

import hashlib
import struct
from array import array
from itertools import count
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.kv.prefix import PrefixIndex

KV_EVENTS_PROTO = Path(__file__).parents[3] / "proto/jdisagg/v1/kv_events.proto"
TOKENS = tuple(range(10, 23))  # 13 tokens: three full pages of 4


def filled(index: PrefixIndex, tokens: tuple[int, ...] = TOKENS, salt: str = "", first_page: int = 1) -> None:
    """Index every full page of `tokens` as pages first_page, first_page + 1, ..."""
    for i, key in enumerate(index.keys(tokens, salt)):
        index.insert(key, first_page + i)


def match(index: PrefixIndex, tokens: tuple[int, ...], salt: str = "") -> tuple[int, ...]:
    return index.match_keys(index.keys(tokens, salt))


def test_only_whole_pages_of_the_longest_common_prefix_match() -> None:
    index = PrefixIndex(4)
    filled(index)
    assert match(index, TOKENS) == (1, 2, 3)
    assert match(index, TOKENS[:11]) == (1, 2)
    assert match(index, (*TOKENS[:6], 0, 0, *TOKENS[8:])) == (1,)
    assert match(index, TOKENS[4:]) == ()
    assert match(index, TOKENS[:3]) == ()
    assert match(index, ()) == ()


def test_a_salt_is_part_of_every_page() -> None:
    index = PrefixIndex(4)
    filled(index, salt="tenant-a")
    assert match(index, TOKENS) == ()
    assert match(index, TOKENS, "tenant-a") == (1, 2, 3)


def test_the_first_page_under_a_key_stays_and_its_eviction_makes_room() -> None:
    index = PrefixIndex(4)
    filled(index)
    key = index.keys(TOKENS)[1]
    assert not index.insert(key, 9)
    index.evict(2)
    assert match(index, TOKENS) == (1,)  # page 3 is there but its parent is not
    assert index.insert(key, 9)
    assert match(index, TOKENS) == (1, 9, 3)
    assert len(index) == 3


def test_reset_names_what_it_forgot() -> None:
    index = PrefixIndex(4)
    filled(index)
    assert sorted(index.reset()) == [1, 2, 3]
    assert match(index, TOKENS) == ()
    assert len(index) == 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 6))
def test_every_full_page_has_a_key_of_its_own_that_the_pages_behind_it_do_not_change(tokens: list[int], page_size: int) -> None:
    index = PrefixIndex(page_size)
    keys = index.keys(tokens)
    assert len(keys) == len(tokens) // page_size == len(set(keys))
    for num_pages in range(len(keys)):
        assert index.keys(tokens[: num_pages * page_size]) == keys[:num_pages]


def test_no_salt_stands_for_a_page_and_what_is_before_it() -> None:
    index = PrefixIndex(4)
    parent, first = next(
        (key, tokens)
        for tokens in ((n, 7, 7, 7) for n in count())
        if is_text(key := index.next_key(index.root_key(""), tokens))
    )
    second, third = (11, 12, 13, 14), (21, 22, 23, 24)
    salt = (parent + array("I", second).tobytes()).decode()
    assert index.keys(third, salt)[0] not in index.keys((*first, *second, *third))


def is_text(key: bytes) -> bool:
    """Whether some salt has these bytes."""
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_keys_are_128_bits_wide() -> None:
    index = PrefixIndex(4)
    assert {len(key) for key in (index.root_key(""), index.root_key("tenant"), *index.keys(TOKENS))} == {16}


def test_keys_can_be_made_outside_as_the_comment_of_kv_events_proto_says() -> None:
    comment = " ".join(line.strip("/ ") for line in KV_EVENTS_PROTO.read_text("utf-8").splitlines() if line.startswith("//"))
    assert "the root's is BLAKE2b-128, personalized with \"salt\", of the request's cache salt in UTF-8" in comment
    key = root = hashlib.blake2b("größe".encode(), digest_size=16, person=b"salt").digest()
    keys = []
    for begin in (0, 4, 8):
        key = hashlib.blake2b(key + struct.pack("<4I", *TOKENS[begin : begin + 4]), digest_size=16).digest()
        keys.append(key)
    assert (PrefixIndex(4).root_key("größe"), PrefixIndex(4).keys(TOKENS, "größe")) == (root, keys)
