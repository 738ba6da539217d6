"""Settings of every test run: JAX on eight virtual CPU devices with strict promotion, bounded properties, time limits.

JAX reads its settings from the environment, so nothing here imports it; processes that tests start inherit them.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from jdisagg.serve.environment import num_threads

NUM_DEVICES = 8
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
JAX_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "NPROC": str(num_threads(NUM_DEVICES)),
}
# Only a hang takes so long, also beside tests that leave little over (scripts/checks.py). By directory; where none is named the
# 60 s of pyproject.toml.
TIME_LIMITS_S = {"unit": 360, "compat": 360, "kernels": 900, "golden": 900, "e2e": 480}
MARKED = frozenset({"kernels", "golden", "e2e"})
TESTS = Path(__file__).parent

os.environ.update(JAX_ENVIRONMENT)
MAKES_CACHE = CACHE_VARIABLE not in os.environ  # here: a conftest.py below may import JAX before pytest is configured
if MAKES_CACHE:
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="jdisagg-xla-")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}".strip()

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=40, stateful_step_count=30, derandomize=True, database=None, **_COMMON)
settings.register_profile("deep", max_examples=1000, stateful_step_count=100, **_COMMON)
# Any failure will do: nothing is made smaller or kept.
_FIRST = {"derandomize": True, "database": None, "report_multiple_bugs": False, "phases": (Phase.explicit, Phase.generate)}
settings.register_profile("mutation", max_examples=20, stateful_step_count=30, **_FIRST, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """The compilation cache of the run, shared with the processes it starts, ends with it."""
    if MAKES_CACHE:
        config.add_cleanup(lambda: shutil.rmtree(os.environ[CACHE_VARIABLE], ignore_errors=True))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No backslash stands in a test's name, not even that of an escaped character: mutmut asks for tests by their names, and
    makes slashes of those. Such a text is known by its argument and a number."""
    return argname if isinstance(val, str | bytes) and "\\" in ascii(val) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by directory and give them their time limit; refuse over-broad `covers`."""
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if kind in MARKED:
            item.add_marker(getattr(pytest.mark, kind))
        if kind in TIME_LIMITS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMITS_S[kind]))
        for marker in item.iter_markers("covers"):
            if not 1 <= len(marker.args) <= 3:
                raise pytest.UsageError(f"{item.nodeid}: covers(...) takes one to three ids, got {len(marker.args)}")


@pytest.fixture
def own_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log without what is said when the tasks of earlier tests are collected."""
    gc.collect()
    caplog.clear()
    return caplog


@pytest.fixture
def no_implicit_transfers() -> Iterator[None]:
    """Inside, an implicit host-to-device copy raises. Tests that do not ask for it do not pay for importing jax."""
    with importlib.import_module("jax").transfer_guard_host_to_device("disallow"):
        yield
