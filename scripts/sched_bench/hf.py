"""transformers' continuous-batching FIFOScheduler with its own paged cache, over a model config of one tiny layer."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any

from sched_bench.load import PAGE_SIZE, TOKEN_BUDGET, Load, Tick

INCLUDES = (
    "clear_cancelled_requests + schedule_batch + update_batch (tokens, ends, page hashes; outputs of ended requests only); "
    "index tensors left out"
)
EOS = 2


def load_transformers() -> Callable[[Load], HFSubject]:
    """Raises ImportError when transformers, torch or this part of them is not there."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    package = "transformers.generation.continuous_batching"
    parts = SimpleNamespace(
        torch=torch,
        model_config=transformers.LlamaConfig,
        batching_config=importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig,
        cache=importlib.import_module(f"{package}.cache").PagedAttentionCache,
        helper=importlib.import_module(f"{package}.distributed").DistributedHelper,
        scheduler=importlib.import_module(f"{package}.scheduler").FIFOScheduler,
        request=importlib.import_module(f"{package}.requests").RequestState,
        update_batch=importlib.import_module(f"{package}.continuous_api").ContinuousBatchProcessor.update_batch,
    )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return lambda load: HFSubject(load, parts)


class HFSubject:
    """See Subject. The real cache object keeps the books; its tensor is 512 bytes per page, so nothing else is measured."""

    def __init__(self, load: Load, parts: Any) -> None:
        self._request = parts.request
        self._update_batch = parts.update_batch
        cache = self._make_cache(load, parts)
        self._scheduler = parts.scheduler(cache, safety_margin=None, max_requests_per_batch=load.running)
        self._budget = (cache.max_batch_tokens, cache.max_tokens_read)
        self._batch: list[Any] = []
        self._tokens: list[int] = []
        self._ended = 0
        # What update_batch reads of its processor.
        self._processor = SimpleNamespace(
            inputs_and_outputs=SimpleNamespace(prepare_batch_update=lambda: (self._batch, self._tokens, None)),
            scheduler=self._scheduler,
            cache=cache,
            use_async_batching=False,
            output_router=SimpleNamespace(deliver_batch=self._deliver),
        )
        self._steps = 0

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        state = self._request(request_id=f"r{number}", initial_tokens=prompt, max_new_tokens=max_tokens, eos_token_id=EOS)
        self._scheduler.add_waiting_request(state)

    def tick(self) -> Tick:
        """One step. Between the two halves, untimed: what building the batch's tensors changes in the request states."""
        t0 = thread_time_ns()
        self._scheduler.clear_cancelled_requests()
        batch, *_ = self._scheduler.schedule_batch(*self._budget)
        t1 = thread_time_ns()
        assert batch, "nothing could be scheduled"
        decode_rows = sum(1 for future in batch if future.state.generated_tokens)
        for future in batch:
            future.state.position_offset += future.query_length
            if future.has_new_token:
                future.state.tokens_to_process = [0]
        self._steps += 1
        new = sum(future.has_new_token for future in batch)
        self._batch, self._tokens, self._ended = batch, [100 + self._steps % 1000] * new, 0
        t2 = thread_time_ns()
        self._update_batch(self._processor)
        t3 = thread_time_ns()
        return Tick(t1 - t0, t3 - t2, decode_rows, new, self._ended)

    def _deliver(self, outputs: list[Any]) -> None:
        self._ended += len(outputs)

    @staticmethod
    def _make_cache(load: Load, parts: Any) -> Any:
        config = parts.model_config(
            num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, vocab_size=64
        )
        config._attn_implementation = "flash_attention_2"  # no attention masks to make room for
        batching = parts.batching_config(
            page_size=PAGE_SIZE,
            num_blocks=load.num_pages,
            max_batch_tokens=TOKEN_BUDGET + load.running,
            max_memory_percent=0.5,
            max_blocks_per_request=256,
        )
        helper = parts.helper(None, None)
        return parts.cache(config, batching, "cpu", helper, dtype=parts.torch.float16)
