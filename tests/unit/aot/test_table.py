"""Words of the tables."""

import pytest

from jdisagg.aot.table import render
from jdisagg.core.config import CacheConfig, Config, ModelConfig
from tests.unit.aot.test_check import said_of


@pytest.mark.parametrize(
    ("cache", "what"),
    [
        (CacheConfig(), "one request of 8,192 tokens"),
        (CacheConfig(kv_cache_bytes=2**31), "this pool"),
        (CacheConfig(num_pages=1024), "this pool"),
        (CacheConfig(num_pages=100), "one request of 8,192 tokens"),  # fewer than the engine would start with
    ],
)
def test_what_is_missing_is_what_was_asked_for(cache: CacheConfig, what: str) -> None:
    config = Config(role="unified", model=ModelConfig(max_model_len=8192), cache=cache)
    text = render(said_of("llama3-8b", "v5e:1x1", config), explain=False)
    (missing,) = [line for line in text.splitlines() if line.startswith("MISSING")]
    assert missing.endswith(f" for {what}")
