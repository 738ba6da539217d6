"""Which two workers pair, over what, and how the others are told why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.fingerprint import Parts
from jdisagg.handoff.identity import PROTOCOL, Agreement, Backend, CacheGroup, Identity, Incompatible, agree, builds_of
from jdisagg.kv.spec import KVSpec
from jdisagg.transfer.jax_server import NUM_ADDRESSES

SPEC = KVSpec(num_layers=2, num_kv_heads=4, features=16, dtype="float32", kind="window", window=64)
GROUP = CacheGroup(spec=SPEC, page_size=16)
GRPC = Backend(name="grpc")
JAX = Backend(name="jax", version="0.10.2", num_transport_addresses=2)


def worker(**changes: object) -> Identity:
    same = Identity(fingerprint="w", worker="p", epoch="e", groups=(GROUP, GROUP), backends=(JAX, GRPC))
    return replace(same, **changes)


def test_equal_workers_pair_over_everything_and_begin_with_what_the_consumer_likes_best() -> None:
    agreement = agree(worker(), worker(backends=(GRPC, JAX)))
    assert agreement == Agreement(protocol=PROTOCOL, backends=("grpc", "jax"))
    assert agreement.backend == "grpc"


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("pid 123 @ 127.0.0.1:9000", "127.0.0.1:9000"),
        ("pid 1 @ [fd00::7]:9000", "[fd00::7]:9000"),
        ("pid 1 @ p-0.prefill:9000", "p-0.prefill:9000"),
        ("pid 1", None),
        ("pid 1 @ here", None),
        ("", None),
        ("somebody @ 127.0.0.1:9000", None),
        ("pid 1 @ 127.0.0.1:9000 or so", None),
    ],
)
def test_a_worker_says_under_which_address_it_registers_or_it_does_not(said: str, address: str | None) -> None:
    assert worker(worker=said).address == address


@pytest.mark.parametrize(
    ("producer", "consumer", "protocol"),
    [((1, 1), (1, 1), 1), ((1, 3), (1, 2), 2), ((1, 2), (2, 5), 2), ((2, 4), (1, 4), 4), ((3, 3), (1, 3), 3)],
)
def test_the_newest_protocol_both_speak_is_taken(producer: tuple[int, int], consumer: tuple[int, int], protocol: int) -> None:
    p, d = (worker(min_protocol=low, max_protocol=high) for low, high in (producer, consumer))
    assert agree(p, d).protocol == protocol


@pytest.mark.parametrize(("producer", "consumer"), [((1, 1), (2, 3)), ((2, 3), (1, 1))])
def test_without_a_common_protocol_both_ranges_are_named(producer: tuple[int, int], consumer: tuple[int, int]) -> None:
    p, d = (worker(min_protocol=low, max_protocol=high) for low, high in (producer, consumer))
    with pytest.raises(Incompatible) as raised:
        agree(p, d)
    assert raised.value.field == "protocol"
    wanted, got = ([*pair] for pair in (producer, consumer))
    assert str(raised.value) == f"protocol: wanted {wanted}, got {got}; pair workers that agree on it"


@pytest.mark.parametrize(
    ("changes", "field", "wanted", "got"),
    [
        ({"fingerprint": "other"}, "fingerprint", "w", "other"),
        ({"groups": (GROUP,)}, "groups", "2", "1"),
        ({"groups": (GROUP, replace(GROUP, spec=replace(SPEC, num_layers=3)))}, "groups[1].num_layers", "2", "3"),
        ({"groups": (replace(GROUP, spec=replace(SPEC, num_kv_heads=8)), GROUP)}, "groups[0].num_kv_heads", "4", "8"),
        ({"groups": (replace(GROUP, spec=replace(SPEC, features=8)), GROUP)}, "groups[0].features", "16", "8"),
        ({"groups": (GROUP, replace(GROUP, spec=replace(SPEC, kind="full")))}, "groups[1].kind", "window", "full"),
        ({"groups": (GROUP, replace(GROUP, spec=replace(SPEC, window=32)))}, "groups[1].window", "64", "32"),
        ({"backends": (replace(JAX, version="0.11"), Backend(name="shm"))}, "backends", "jax 0.10.2, grpc", "jax 0.11, shm"),
        ({"backends": ()}, "backends", "jax 0.10.2, grpc", "none"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(changes: dict[str, object], field: str, wanted: str, got: str) -> None:
    with pytest.raises(Incompatible) as raised:
        agree(worker(), worker(**changes))
    assert raised.value.field == field
    assert str(raised.value) == f"{field}: wanted {wanted}, got {got}; pair workers that agree on it"


PARTS = (("model.rope.theta", "1e4"), ("numerics", "exact"), ("weights.layers", "aa"))


def made_of(**changes: str) -> Parts:
    return tuple((name, changes.get(name.rpartition(".")[2], value)) for name, value in PARTS)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (made_of(numerics="fast"), "numerics: wanted exact, got fast"),
        (made_of(theta="1e6"), "model.rope.theta: wanted 1e4, got 1e6"),
        (made_of(numerics="fast", layers="bb"), "numerics: wanted exact, got fast (also: weights.layers)"),
        (
            made_of(theta="1e6", numerics="fast", layers="bb"),
            "model.rope.theta: wanted 1e4, got 1e6 (also: numerics, weights.layers)",
        ),
        (PARTS[::-1], "fingerprint: wanted w, got other"),
        (PARTS[:2], "weights.layers: wanted aa, got (none)"),
        ((*PARTS, ("model.new", "3")), "model.new: wanted (none), got 3"),
        ((), "fingerprint: wanted w, got other"),
    ],
)
def test_unlike_fingerprints_are_refused_by_the_part_that_differs(got: Parts, message: str) -> None:
    with pytest.raises(Incompatible) as raised:
        agree(worker(fingerprint_parts=PARTS), worker(fingerprint="other", fingerprint_parts=got))
    assert raised.value.field == message.partition(":")[0]
    assert str(raised.value) == f"{message}; pair workers that agree on it"


def test_a_producer_that_does_not_say_what_its_fingerprint_is_made_of_names_the_fingerprint() -> None:
    with pytest.raises(Incompatible, match="fingerprint: wanted w, got other;"):
        agree(worker(), worker(fingerprint="other", fingerprint_parts=PARTS))


def test_parts_only_tell_and_equal_fingerprints_pair() -> None:
    assert agree(worker(fingerprint_parts=PARTS), worker(fingerprint_parts=made_of(numerics="fast"))).protocol == PROTOCOL


def test_what_is_converted_and_what_only_tells_may_differ() -> None:
    other = tuple(replace(group, page_size=64, spec=replace(group.spec, dtype="int8")) for group in worker().groups)
    unlike = worker(groups=other, worker="d", epoch="f", build="newer")
    assert agree(worker(), unlike).backends == ("jax", "grpc")


@pytest.mark.parametrize(
    ("builds", "said"),
    [(("1.2", "1.3"), " (builds 1.2 and 1.3)"), (("1.2", "1.2"), ""), (("", "1.3"), ""), (("1.2", ""), "")],
)
def test_a_refusal_names_both_builds_where_they_are_known_to_be_unlike(builds: tuple[str, str], said: str) -> None:
    p, d = (worker(build=build) for build in builds)
    assert builds_of(p, d) == said


@pytest.mark.parametrize(
    ("producer", "consumer", "pairs"),
    [
        (JAX, JAX, True),
        (JAX, replace(JAX, version="0.11"), False),
        (JAX, replace(JAX, version=""), True),
        (replace(JAX, version=""), JAX, True),
        (JAX, replace(JAX, num_transport_addresses=1), False),
        (JAX, replace(JAX, num_transport_addresses=3), True),
        (replace(JAX, num_transport_addresses=NUM_ADDRESSES), JAX, False),  # of the first versions, which have two
        (JAX, replace(JAX, name="xla"), False),
    ],
)
def test_a_backend_is_shared_when_neither_its_version_nor_its_addresses_forbid_it(
    producer: Backend, consumer: Backend, pairs: bool
) -> None:
    agreed = agree(worker(backends=(producer, GRPC)), worker(backends=(consumer, GRPC)))
    assert agreed.backends == ((consumer.name, "grpc") if pairs else ("grpc",))
