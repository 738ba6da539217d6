"""KV on the host, pages copied, several steps in one dispatch: what a plan may ask for beside its rows."""

import jax
import numpy as np
import pytest

from jdisagg.core.config import Numerics
from jdisagg.engine import host_copies
from jdisagg.sched.plan import HostCopy, PageCopy, Plan
from tests.unit.engine.support import Driver, admit, chunk_up, make, prompt_of, tokens

PROMPT = prompt_of(21)
PAGES, ELSEWHERE = tuple(range(1, 7)), tuple(range(20, 26))
RANGES = ((0, 8), (8, 16), (16, 21))


@pytest.fixture(scope="module", params=["fast", "exact", "fast int8"])
def runner(request):
    numerics, _, kv_dtype = request.param.partition(" ")
    return make(num_pages=80, numerics=Numerics(numerics), kv_dtype=kv_dtype or None)


def kv(runner, pages):
    """KV of the prompt's tokens in `pages`, the scales of int8 data beside it."""
    pieces = [(runner.export_tokens((pages,), *ends), ends[1] - ends[0]) for ends in RANGES]
    rows = [np.concatenate([np.float32(array)[:, :length] for array in piece.arrays], axis=-1) for piece, length in pieces]
    return np.concatenate(rows, axis=1)


def computed(runner):
    """The prompt's KV is in PAGES; returns it."""
    driver = Driver(runner)
    driver.run(admit=(admit(0, PAGES, PROMPT),), prefill=chunk_up(0, PROMPT, [21]))
    driver.run(evict=(0,))
    assert kv(runner, PAGES).any()
    return kv(runner, PAGES)


def bytes_of(copies):
    """Host memory that they take."""
    arrays = jax.tree.leaves([copy.pieces for copy in copies._copies.values()])
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def under_way(runner):
    """Pieces that are waited for when the next step is read, and their bytes."""
    return len(runner._host._under_way), runner._host._bytes_under_way


def overwrite(pages):
    """Page copies that leave other bytes in `pages`."""
    return tuple(PageCopy(source=70 - page, target=page) for page in pages)


def test_copied_pages_hold_the_same_bytes(runner):
    before = computed(runner)
    copies = tuple(PageCopy(source=a, target=b) for a, b in zip(PAGES, ELSEWHERE, strict=True))  # several pieces
    runner.collect(runner.dispatch(Plan(step_id=1, copies=copies)))
    np.testing.assert_array_equal(kv(runner, ELSEWHERE), before)


@pytest.mark.parametrize("settles", [True, False], ids=["after it has settled", "at once"])
def test_kv_survives_the_way_through_host_memory(runner, settles):
    before = computed(runner)
    out = HostCopy(key="a", page_table=(PAGES,), num_tokens=21)
    handle = runner.dispatch(Plan(step_id=1, offload=(out,)))
    runner.dispatch(Plan(step_id=2, copies=overwrite(PAGES)))
    if settles:
        runner.collect(handle)
    assert not np.array_equal(kv(runner, PAGES), before)
    back = HostCopy(key="a", page_table=(ELSEWHERE,), num_tokens=21)
    runner.collect(runner.dispatch(Plan(step_id=3, restore=(back,))))
    np.testing.assert_array_equal(kv(runner, ELSEWHERE), before)
    assert len(runner._host) == 0


def test_pages_are_copied_before_what_is_in_them_goes_to_the_host(runner):
    """A choice that forks and loses its pages in one step."""
    before, its_own, there = computed(runner), tuple(range(52, 58)), tuple(range(58, 64))
    assert not np.array_equal(kv(runner, its_own), before)
    copies = tuple(PageCopy(source=a, target=b) for a, b in zip(PAGES, its_own, strict=True))
    out = HostCopy(key="a", page_table=(its_own,), num_tokens=21)
    runner.collect(runner.dispatch(Plan(step_id=1, copies=copies, offload=(out,))))
    runner.collect(runner.dispatch(Plan(step_id=2, restore=(HostCopy(key="a", page_table=(there,), num_tokens=21),))))
    np.testing.assert_array_equal(kv(runner, there), before)


@pytest.mark.parametrize("settles", [True, False], ids=["after it has settled", "at once"])
@pytest.mark.parametrize("most", [1, 2])
def test_copies_under_way_take_little_of_the_device(runner, monkeypatch, most, settles):
    """Two sequences leave in one step: six pieces, as much as their pages, would lie on the device beside those."""
    before = computed(runner)
    size = sum(array.nbytes for array in runner.export_tokens((PAGES,), 0, 1).arrays)
    monkeypatch.setattr(host_copies, "MOST_BYTES", most * size)
    held, export = [], runner.device.export

    def counted(where):
        pieces = [piece for copy in runner._host._copies.values() for piece in copy.pieces]
        held.append(sum(isinstance(piece.data, jax.Array) for piece in pieces))
        return export(where)

    monkeypatch.setattr(runner.device, "export", counted)
    out = tuple(HostCopy(key=key, page_table=(PAGES,), num_tokens=21) for key in "ab")
    handle = runner.dispatch(Plan(step_id=1, offload=out))
    assert len(held) == 6
    assert max(held) < most
    if settles:
        runner.collect(handle)
    runner.dispatch(Plan(step_id=2, forget=("a",), copies=overwrite(PAGES)))
    monkeypatch.undo()
    runner.collect(runner.dispatch(Plan(step_id=3, restore=(HostCopy(key="b", page_table=(ELSEWHERE,), num_tokens=21),))))
    np.testing.assert_array_equal(kv(runner, ELSEWHERE), before)
    assert len(runner._host) == 0
    assert under_way(runner) == (0, 0)


@pytest.mark.parametrize("most", [1, 2])
def test_pieces_on_their_way_back_take_little_of_the_device(runner, monkeypatch, most):
    """Two sequences come back in one step: as much as their pages would lie on the device beside those, behind the step that
    runs."""
    before, device = computed(runner), runner.device
    out = tuple(HostCopy(key=key, page_table=(PAGES,), num_tokens=21) for key in "ab")
    runner.collect(runner.dispatch(Plan(step_id=1, offload=out)))
    size = sum(array.nbytes for array in runner.export_tokens((PAGES,), 0, 1).arrays)
    monkeypatch.setattr(host_copies, "MOST_BYTES", most * size)
    lying, cache, import_piece, wait = [0], [None], device.import_piece, jax.block_until_ready

    def imported(piece, where):
        import_piece(piece, where)
        lying[-1] += 1
        cache[0] = device.pool._arrays

    def waited(arrays):
        assert arrays is cache[0], "all that was put there"
        lying.append(0)
        return wait(arrays)

    monkeypatch.setattr(device, "import_piece", imported)
    monkeypatch.setattr(jax, "block_until_ready", waited)
    places = {"a": tuple(range(30, 36)), "b": ELSEWHERE}
    back = tuple(HostCopy(key=key, page_table=(pages,), num_tokens=21) for key, pages in places.items())
    handle = runner.dispatch(Plan(step_id=2, restore=back))
    monkeypatch.undo()
    runner.collect(handle)
    assert lying == [most] * (6 // most)
    for pages in places.values():
        np.testing.assert_array_equal(kv(runner, pages), before)


@pytest.mark.parametrize("num_tokens", [5, 8, 21])
def test_a_copy_takes_the_bytes_of_its_tokens(runner, num_tokens):
    out = HostCopy(key="a", page_table=(PAGES,), num_tokens=num_tokens)
    runner.collect(runner.dispatch(Plan(step_id=1, offload=(out,))))
    one = runner.export_tokens((PAGES,), 0, 1)
    assert bytes_of(runner._host) == num_tokens * sum(array[:, :1].nbytes for array in one.arrays)
    runner.collect(runner.dispatch(Plan(step_id=2, forget=("a",))))
    assert bytes_of(runner._host) == 0


def test_a_forgotten_copy_is_gone(runner):
    out = HostCopy(key="a", page_table=(PAGES,), num_tokens=21)
    runner.collect(runner.dispatch(Plan(step_id=1, offload=(out,))))
    assert len(runner._host) == 1
    runner.collect(runner.dispatch(Plan(step_id=2, forget=("a",))))
    assert len(runner._host) == 0


def test_nobody_waits_for_what_is_forgotten(runner):
    out = tuple(HostCopy(key=key, page_table=(PAGES,), num_tokens=21) for key in "ab")
    handle = runner.dispatch(Plan(step_id=1, offload=out))
    six = under_way(runner)
    runner.dispatch(Plan(step_id=2, forget=("b",)))
    assert under_way(runner) == (3, six[1] // 2)
    runner.collect(handle)
    assert under_way(runner) == (0, 0)
    runner.dispatch(Plan(step_id=3, forget=("a",)))


@pytest.mark.parametrize("num_steps", [2, 3, 11])
def test_several_steps_in_one_dispatch_give_the_tokens_of_single_ones(runner, num_steps):
    """Two rows; beyond the end of the shorter one's pages nothing of anybody else is touched."""
    driver, short = Driver(runner), prompt_of(3, seed=4)
    single = [tokens(driver.generate(0, range(1, 17), p, num=12)) for p in (PROMPT, short)]
    neighbour = computed(runner)
    admits = (admit(0, range(30, 46), PROMPT), admit(1, (50, 51), short))  # room for 8 tokens of the second
    first = driver.run(admit=admits, prefill=(*chunk_up(0, PROMPT, [21]), *chunk_up(1, short, [3])))
    got = {one.slot: list(one.token_ids) for one in first.sampled}
    while len(got[0]) < 12:
        for one in driver.run(decode=(0, 1), num_steps=num_steps).sampled:
            assert len(one.token_ids) == num_steps
            got[one.slot] += one.token_ids
    assert got[0][:12] == single[0]
    assert got[1][:6] == single[1][:6]
    np.testing.assert_array_equal(kv(runner, PAGES), neighbour)
    driver.run(evict=(0, 1))
