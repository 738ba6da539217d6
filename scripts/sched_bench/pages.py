"""Cost of page operations (kv.allocator, kv.prefix) and of one request's way into and out of a long queue."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from time import thread_time_ns
from typing import Any

from jdisagg.kv.allocator import PageAllocator
from jdisagg.kv.prefix import PrefixIndex
from sched_bench.load import PAGE_SIZE, Load
from sched_bench.ours import OurSubject

PROMPT_PAGES = 64  # a prompt of 1,024 tokens
NUM_PROMPTS = 64
NUM_CANCELS = 64


def page_costs() -> dict[str, float]:
    """Microseconds per page of each operation, over 64 different prompts of 64 pages; one allocation call takes 64 pages."""
    draw = random.Random(1)
    prompts = [tuple(draw.choices(range(30_000), k=PROMPT_PAGES * PAGE_SIZE)) for _ in range(NUM_PROMPTS)]
    index = PrefixIndex(PAGE_SIZE)
    allocator = PageAllocator(NUM_PROMPTS * PROMPT_PAGES + 1, index.has, index.evict)
    costs: dict[str, float] = {}
    keys = [index.keys(prompt) for prompt in prompts]
    costs["hash"] = _per_page(index.keys, prompts)
    held = [_taken(allocator) for _ in prompts]
    for pages in held:
        allocator.free(pages)
    held.clear()
    costs["allocate"] = _per_page(lambda _: held.append(_taken(allocator)), prompts)
    costs["free"] = _per_page(allocator.free, held)
    held = [_taken(allocator) for _ in prompts]

    def publish(pair: tuple[list[bytes], tuple[int, ...]]) -> None:
        for key, page in zip(*pair, strict=True):
            index.insert(key, page)

    costs["index"] = _per_page(publish, list(zip(keys, held, strict=True)))
    costs["free, stays cached"] = _per_page(allocator.free, held)
    costs["prefix hit"] = _per_page(lambda k: allocator.retain(index.match_keys(k)), keys)
    for pages in held:
        allocator.free(pages)
    costs["allocate by eviction"] = _per_page(lambda _: _taken(allocator), prompts)
    assert allocator.num_free == 0
    assert len(index) == 0
    return costs


def queue_costs(num_waiting: int) -> dict[str, float]:
    """Microseconds to queue a request behind `num_waiting` others, and to cancel one from the middle of them."""
    load = Load(running=1, waiting=num_waiting + NUM_CANCELS, churn=True)
    subject = OurSubject(load)
    requests = [load.request(number) for number in range(num_waiting + NUM_CANCELS)]
    for number in range(num_waiting):
        subject.add(number, *requests[number])
    new = range(num_waiting, num_waiting + NUM_CANCELS)
    added = _total_us(lambda number: subject.add(number, *requests[number]), new)
    middle = range(num_waiting // 2 - NUM_CANCELS // 2, num_waiting // 2 + NUM_CANCELS // 2)
    cancelled = _total_us(lambda number: subject.scheduler.cancel(f"r{number}"), middle)
    return {"add": added / NUM_CANCELS, "cancel": cancelled / NUM_CANCELS}


def _taken(allocator: PageAllocator) -> tuple[int, ...]:
    pages = allocator.alloc(PROMPT_PAGES)
    assert pages is not None, "the pool is too small for this measurement"
    return pages


def _per_page(operation: Callable[[Any], object], arguments: Iterable[Any]) -> float:
    return _total_us(operation, arguments) / (NUM_PROMPTS * PROMPT_PAGES)


def _total_us(operation: Callable[[Any], object], arguments: Iterable[Any]) -> float:
    began = thread_time_ns()
    for argument in arguments:
        operation(argument)
    return (thread_time_ns() - began) / 1e3
