"""Memory: the published shapes of known models on known devices, with the figures a reader can work out."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.aot.abstract import ModelForm
from jdisagg.aot.accelerators import GIB, read_accelerators
from jdisagg.aot.budget import make_budget
from jdisagg.aot.planned import PlannedEngine
from jdisagg.aot.remedies import remedies
from jdisagg.core.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    LayerLoop,
    LocalConfig,
    ModelConfig,
    Numerics,
    SchedulerConfig,
)
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.models.resolve import read_model_config
from jdisagg.models.spec import ModelSpec

MODELS = Path(__file__).parents[3] / "configs" / "models"
DEVICES = read_accelerators()


def form(name: str, **changes: object) -> ModelForm:
    spec = ModelSpec.from_config(read_model_config(str(MODELS / f"{name}.json")))
    base = ModelForm(spec=spec, dtype="bfloat16", kv_dtype="bfloat16", layer_loop=LayerLoop.UNROLLED)
    return replace(base, **changes)


def engine(tp: int) -> PlannedEngine:
    return PlannedEngine(role=Role.UNIFIED, tp=tp, devices=tuple(range(tp)))


def test_70b_on_eight_v6e_chips_has_the_weights_of_its_model_card_and_the_kv_of_the_rest() -> None:
    config = Config(cache=CacheConfig(page_size=64), scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048))
    budget, sizes = make_budget(form("llama3-70b"), engine(8), config, DEVICES["v6e"])
    # 70.55 billion parameters, all cut eight ways but the norms: 161 of 8192
    assert budget.weights_bytes == pytest.approx(70.5537e9 * 2 / 8, rel=1e-3)
    assert budget.page_bytes == 64 * 80 * 1 * 256 * 2  # one of eight KV heads on each device
    assert budget.steps_bytes == 4 * (8 * 2048 * 28672 + 13 * 64 * 128256)
    left = int(int(31.25 * GIB) * 0.9) - budget.weights_bytes - budget.steps_bytes
    assert (budget.num_pages, budget.missing_bytes, budget.problem) == (8 * left // (8 * budget.page_bytes), 0, None)
    assert sizes is not None
    assert sizes.device.pages_per_seq == 128


@pytest.mark.parametrize(
    ("role", "numerics", "device", "sampled"),
    [
        (Role.DECODE, Numerics.FAST, "v6e", 10 * 256),
        (Role.UNIFIED, Numerics.FAST, "h200", 5 * 256),
        (Role.PREFILL, Numerics.FAST, "v6e", 10 * 16),
        (Role.DECODE, Numerics.EXACT, "v6e", 10 * 16),
        (Role.PREFILL, Numerics.FAST, "h200", 5 * 16),
    ],
)
def test_room_for_sampling_is_kept_for_the_rows_that_are_sampled_at_once(
    role: Role, numerics: Numerics, device: str, sampled: int
) -> None:
    config = Config(model=ModelConfig(numerics=numerics), scheduler=SchedulerConfig(max_num_seqs=256))
    budget, _ = make_budget(form("llama3-8b"), replace(engine(1), role=role), config, DEVICES[device])
    widest = 8 * config.scheduler.max_num_batched_tokens * 14336
    assert budget.steps_bytes == 4 * (widest + (3 * 256 + sampled) * 128256)


def test_an_engine_of_few_rows_still_scores_prompts() -> None:
    few = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
    budget, _ = make_budget(form("llama3-8b"), engine(1), Config(scheduler=few), DEVICES["h200"])
    assert budget.steps_bytes == 4 * 4 * 64 * 128256


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        (SchedulerConfig(enable_chunked_prefill=False), "without chunked prefill one step computes up to 8192 tokens"),
        (SchedulerConfig(max_num_kv_read_tokens=3), "max_num_kv_read_tokens is 3"),
        (SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=32), "but 64 sequences decode 64 tokens a step"),
    ],
)
def test_what_the_scheduler_would_refuse_is_a_problem_and_its_remedies_start(scheduler: SchedulerConfig, told: str) -> None:
    given = form("llama3-8b"), engine(1), Config(role="unified", scheduler=scheduler), DEVICES["h200"]
    budget, sizes = make_budget(*given)
    assert sizes is None
    assert told in (budget.problem or "")
    assert not any("--max-num-batched-tokens" in remedy.change for remedy in remedies(*given))


def test_8b_does_not_fit_one_v5e_chip_and_it_says_what_is_missing_and_what_would_do() -> None:
    budget, sizes = make_budget(form("llama3-8b"), engine(1), Config(), DEVICES["v5e"])
    assert sizes is None
    assert budget.problem is not None
    assert "--device-memory-utilization" in budget.problem
    one_request = 513 * budget.page_bytes  # 8192 tokens in pages of 16, and the null page
    usable = int(int(15.75 * GIB) * 0.9)
    assert budget.missing_bytes == budget.weights_bytes + budget.steps_bytes + one_request - usable
    found = {remedy.change: remedy for remedy in remedies(form("llama3-8b"), engine(1), Config(role="unified"), DEVICES["v5e"])}
    two = next(remedy for change, remedy in found.items() if change.startswith("--tp 2"))
    tried, _ = make_budget(form("llama3-8b"), engine(2), Config(), DEVICES["v5e"])
    assert (tried.problem, tried.kv_tokens) == (None, two.kv_tokens)
    assert any("NVIDIA H200" in change for change in found)


def test_a_fixed_pool_that_does_not_fit_is_refused_though_the_engine_would_try() -> None:
    config = Config(cache=CacheConfig(kv_cache_bytes=200 * GIB))
    budget, sizes = make_budget(form("llama3-8b"), engine(1), config, DEVICES["h200"])
    assert sizes is None
    assert budget.problem is not None
    assert budget.problem.startswith("--kv-cache-bytes: weights, pool, steps and KV on its way need")
    assert any(
        remedy.change.startswith("--kv-cache-bytes")
        for remedy in remedies(form("llama3-8b"), engine(1), config, DEVICES["h200"])
    )


@pytest.mark.parametrize(
    ("name", "kv_cache_bytes", "told"),
    [
        ("llama3-8b", 200 * GIB, "need 215.24 GiB of a device, it has 104.85; lower it"),
        ("llama3-70b", GIB, "need 132.91 GiB of a device, it has 104.85; no pool is small enough, use more devices"),
    ],
)
def test_a_smaller_pool_is_advised_where_one_would_fit(name: str, kv_cache_bytes: int, told: str) -> None:
    config = Config(cache=CacheConfig(kv_cache_bytes=kv_cache_bytes))
    budget, _ = make_budget(form(name), engine(1), config, DEVICES["h200"])
    assert budget.problem == f"--kv-cache-bytes: weights, pool, steps and KV on its way {told}"


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("share", [0.9, 0.97])
def test_all_that_8b_puts_on_a_device_is_within_its_share_and_no_page_more_would_be(
    role: Role, device: str, share: float
) -> None:
    planned = PlannedEngine(role=role, tp=1, devices=(0,))
    config = Config(cache=CacheConfig(device_memory_utilization=share), scheduler=SchedulerConfig(host_kv_bytes=GIB))
    budget, _ = make_budget(form("llama3-8b"), planned, config, DEVICES[device])
    piece_bytes = 256 * 32 * 8 * 256 * 2
    copies_bytes = 2 * 2**29
    buffers_bytes = 0 if role is Role.UNIFIED else 2 * 256 * 2**20 + piece_bytes
    assert budget.moving_bytes == copies_bytes + buffers_bytes
    assert budget.usable_bytes is not None
    assert 0 <= budget.usable_bytes - budget.total_bytes < budget.page_bytes


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_a_tenth_more_pages_of_8b_than_nearly_all_of_a_device_holds_is_too_much_for_its_weights_and_pool_alone(
    role: Role, device: str
) -> None:
    """What `scripts/gpu_check.sh` tries: an estimate must not be so careful that it leaves a tenth of the pool unused."""
    planned = PlannedEngine(role=role, tp=1, devices=(0,))
    config = Config(cache=CacheConfig(device_memory_utilization=0.97))
    budget, _ = make_budget(form("llama3-8b"), planned, config, DEVICES[device])
    assert budget.limit_bytes is not None
    assert budget.weights_bytes + int(1.1 * budget.num_pages) * budget.page_bytes > budget.limit_bytes


def test_a_given_pool_that_leaves_no_room_for_kv_on_its_way_is_refused() -> None:
    decode = PlannedEngine(role=Role.DECODE, tp=1, devices=(0,))
    free, _ = make_budget(form("llama3-8b"), decode, Config(), DEVICES["h200"])
    assert free.limit_bytes is not None
    most = (free.limit_bytes - free.weights_bytes - free.steps_bytes) // free.page_bytes
    fitting = most - -(-free.moving_bytes // free.page_bytes)
    for num_pages, fits in ((fitting, True), (most, False)):
        budget, _ = make_budget(form("llama3-8b"), decode, Config(cache=CacheConfig(num_pages=num_pages)), DEVICES["h200"])
        assert (budget.problem is None) is fits


def test_pieces_are_cut_over_the_devices_that_hold_their_heads() -> None:
    sizes = [
        make_budget(
            form("llama3-8b"), PlannedEngine(role=Role.PREFILL, tp=tp, devices=tuple(range(tp))), Config(), DEVICES["v5p"]
        )
        for tp in (1, 8, 16)
    ]
    whole, eighth, replicated = (budget.moving_bytes for budget, _ in sizes)
    assert (eighth, replicated) == (whole // 8, whole), "at sixteen devices, which share heads, each has the piece"


def test_int8_halves_a_page_but_for_its_scales() -> None:
    config = Config(cache=CacheConfig(page_size=128))
    whole, _ = make_budget(form("llama3-8b"), engine(1), config, DEVICES["v5p"])
    half, _ = make_budget(form("llama3-8b", kv_dtype="int8"), engine(1), config, DEVICES["v5p"])
    assert half.page_bytes == whole.page_bytes // 2 + 128 * 32 * 8 * 8


def test_kv_heads_fewer_than_devices_are_stored_by_all() -> None:
    at_eight, _ = make_budget(form("llama3-8b"), engine(8), Config(), DEVICES["v5p"])
    at_sixteen, _ = make_budget(form("llama3-8b"), engine(16), Config(), DEVICES["v5p"])
    assert at_sixteen.page_bytes == at_eight.page_bytes


def test_a_model_that_cannot_be_cut_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 3, wanted a divisor of num_attention_heads = 32"):
        make_budget(form("llama3-8b"), engine(3), Config(), DEVICES["v5e"])


def test_a_length_that_the_pool_cannot_hold_is_the_engines_own_refusal() -> None:
    config = Config(model=ModelConfig(max_model_len=8192), cache=CacheConfig(num_pages=10))
    budget, _ = make_budget(form("llama3-8b"), engine(1), config, DEVICES["v6e"])
    assert budget.problem is not None
    assert budget.problem.startswith("--max-model-len: got 8192, 10 pages of 16 tokens hold 144")


def test_no_more_devices_are_advised_than_one_host_has() -> None:
    wide = form("llama3-70b", dtype="float32")  # 263 GiB: eight chips of v5e have 126, of v6e 250
    advised = [each.change for each in remedies(wide, engine(1), Config(role="unified"), DEVICES["v5e"])]
    assert [change.partition(",")[0] for change in advised if change.startswith("--tp ")] == [
        "--tp 4 (4 x TPU v5p",
        "--tp 4 (4 x TPU7x (half a chip)",
        "--tp 8 (8 x NVIDIA H100",
        "--tp 4 (4 x NVIDIA H200",
    ]


@pytest.mark.parametrize(
    ("role", "advised"),
    [
        (
            "colocated",
            ["--prefill-tp 2, and other --devices (2 x TPU v5e)", "--decode-tp 2, and other --devices (2 x TPU v5e)"],
        ),
        ("local", ["--prefill-tp 2, and other --devices (2 x TPU v5e)", "--decode-tp 2, and other --devices (2 x TPU v5e)"]),
        ("decode", ["--tp 2, and other --devices (2 x TPU v5e)"] * 2),
    ],
)
def test_devices_are_advised_by_the_flag_of_their_engine(role: str, advised: list[str]) -> None:
    engines = [PlannedEngine(role=each, tp=1, devices=(0,)) for each in (Role.PREFILL, Role.DECODE)]
    config = Config(role=role, local=LocalConfig(prefill_tp=1, decode_tp=1), device=DeviceConfig(devices="0"))
    found = [remedies(form("llama3-8b"), each, config, DEVICES["v5e"]) for each in engines]
    assert [next(each.change for each in one if "tp 2, " in each.change) for one in found] == advised


def test_devices_that_the_other_engines_of_the_host_leave_are_advised() -> None:
    """Eight v5e chips hold 8B in float32 cut over four, and one more engine of four beside it, but not of eight."""
    wide, planned = form("llama3-8b", dtype="float32"), PlannedEngine(role=Role.PREFILL, tp=2, devices=(0, 1))
    for decode_tp, there in ((4, True), (8, False)):
        config = Config(role="local", local=LocalConfig(prefill_tp=2, decode_tp=decode_tp))
        changes = [each.change for each in remedies(wide, planned, config, DEVICES["v5e"])]
        assert ("--prefill-tp 4 (4 x TPU v5e)" in changes) is there


def test_a_kind_of_device_whose_host_is_smaller_than_the_tp_asked_for_is_advised_all_the_same() -> None:
    found = [remedy.change for remedy in remedies(form("llama3-70b"), engine(8), Config(role="unified"), DEVICES["v5e"])]
    assert any(change.startswith("--tp 2 (2 x TPU v5p") for change in found), found


def test_no_more_gpus_are_advised_than_the_other_engines_of_the_host_leave() -> None:
    config = Config(role="local", local=LocalConfig(prefill_tp=8, decode_tp=1))
    decode = PlannedEngine(role=Role.DECODE, tp=1, devices=(0,))
    found = [remedy.change for remedy in remedies(form("llama3-70b"), decode, config, DEVICES["h100"])]
    assert not any("--decode-tp" in change and "H100" in change for change in found), found
