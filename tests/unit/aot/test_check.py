"""The whole answer on this machine's CPU, beside the real engine that it speaks of."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import jax
import pytest

from jdisagg.aot import roofline
from jdisagg.aot.abstract import AbstractEngine, ModelForm
from jdisagg.aot.accelerators import parse_topology, read_accelerators
from jdisagg.aot.check import Question, check
from jdisagg.aot.command import Effort
from jdisagg.aot.compiled import compile_step
from jdisagg.aot.planned import planned_mesh
from jdisagg.aot.report import Report
from jdisagg.aot.roofline import Roofline, Workload
from jdisagg.aot.table import render
from jdisagg.core.config import CacheConfig, Config, LayerLoop, LocalConfig, ModelConfig, Numerics, SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.engine.build import make_runner
from jdisagg.engine.executables import executables
from jdisagg.engine.signatures import STATE_UPDATES
from jdisagg.engine.sizing import size_engine
from jdisagg.models.resolve import read_model_config
from jdisagg.models.spec import ModelSpec
from tests.unit.aot.test_budget import MODELS
from tests.unit.engine.support import load

CONFIG = Config(
    role="unified",
    model=ModelConfig(max_model_len=64),
    cache=CacheConfig(page_size=4, num_pages=64),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
)


def said_of(name: str, topology: str, config: Config) -> Report:
    config = replace(config, model=replace(config.model, model=str(MODELS / f"{name}.json")))
    question = Question(
        config=config,
        topology=parse_topology(topology),
        effort=Effort(compile=False, all_executables=False, all_layers=False),
        progress=lambda text: None,
    )
    return check(question)


@pytest.mark.parametrize(("tp", "kv_dtype"), [(1, "float32"), (2, "int8"), (4, "float32")])
def test_an_abstract_engine_has_the_arrays_and_executables_of_the_real_one(tp: int, kv_dtype: str) -> None:
    loaded, mesh = load("float32", tp, kv_dtype)
    runner = make_runner(loaded, mesh, CONFIG, Role.UNIFIED)
    form = ModelForm(spec=loaded.spec, dtype="float32", kv_dtype=kv_dtype, layer_loop=LayerLoop.UNROLLED)
    sizes = size_engine(loaded.spec, runner.device.layout, CONFIG, Role.UNIFIED, lambda: None)
    engine = AbstractEngine(form=form, mesh=mesh, page_size=4, sizes=sizes)

    def shapes(tree: object) -> list[object]:
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.shard_shape(x.shape)), jax.tree.leaves(tree))

    kv = runner.device.pool.take()
    runner.device.pool.put(kv)
    assert shapes(engine.params) == shapes(loaded.params)
    assert shapes((engine.kv,)) == shapes(kv)
    assert shapes(engine.state) == shapes(runner.device._state)
    wanted = [(each.name, each.shape) for each in executables(runner.shape, runner.device.shape)]
    assert [(each.name, each.shape) for each in engine.executables()] == wanted


def test_every_executable_lowers_and_stays_in_place() -> None:
    loaded, mesh = load("float32", 2)
    form = ModelForm(spec=loaded.spec, dtype="float32", kv_dtype="float32", layer_loop=LayerLoop.UNROLLED)
    sizes = size_engine(loaded.spec, form.layout(mesh, 4), CONFIG, Role.UNIFIED, lambda: None)
    engine = AbstractEngine(form=form, mesh=mesh, page_size=4, sizes=sizes)
    steps = {each.name: compile_step(engine, each) for each in engine.executables()}
    assert set(steps) == {*STATE_UPDATES, "prefill", "score", "decode", "export", "import"}
    assert all(step.error is None and step.in_place for step in steps.values())
    counts = {each.kind: each.count for each in steps["decode"].program.collectives if not each.optional}
    assert counts["all-reduce"] >= 2 * loaded.spec.num_layers


def test_every_function_gives_over_what_its_signature_says_and_nothing_else() -> None:
    loaded, mesh = load("float32", 1)
    form = ModelForm(spec=loaded.spec, dtype="float32", kv_dtype="float32", layer_loop=LayerLoop.UNROLLED)
    for numerics in Numerics:
        config = replace(CONFIG, model=replace(CONFIG.model, numerics=numerics))
        sizes = size_engine(loaded.spec, form.layout(mesh, 4), config, Role.UNIFIED, lambda: None)
        engine = AbstractEngine(form=form, mesh=mesh, page_size=4, sizes=sizes)
        for each in engine.executables():
            held = engine.lower(each).args_info[0][: len(each.signature.takes)]
            given = [{leaf.donated for leaf in jax.tree.leaves(part)} for part in held]
            assert given == [{operand in each.signature.donates} for operand in each.signature.takes], each.name


def test_a_deep_unrolled_model_is_extrapolated_and_says_so() -> None:
    loaded, mesh = load("float32", 2, num_hidden_layers=9)
    form = ModelForm(spec=loaded.spec, dtype="float32", kv_dtype="float32", layer_loop=LayerLoop.UNROLLED)
    sizes = size_engine(loaded.spec, form.layout(mesh, 4), CONFIG, Role.UNIFIED, lambda: None)
    engine = AbstractEngine(form=form, mesh=mesh, page_size=4, sizes=sizes)
    (decode,) = [each for each in engine.executables() if each.name == "decode"]
    guessed, whole = compile_step(engine, decode), compile_step(engine, decode, all_layers=True)
    assert (guessed.layers, whole.layers) == ((2, 3), (9,))
    assert [(each.kind, each.count) for each in guessed.program.collectives] == [
        (each.kind, each.count) for each in whole.program.collectives
    ]
    assert guessed.in_place
    assert (guessed.donated_bytes, guessed.cache_bytes) == (whole.donated_bytes, whole.cache_bytes)


def test_the_answer_is_a_table_and_json() -> None:
    report = said_of("llama3-8b", "v5e:1x1", Config(role="unified"))
    assert not report.fits
    text = render(report, explain=True)
    assert "verdict  does not fit: 2.10 GiB are missing on each device" in text
    assert "would fit: --tp 2 (2 x TPU v5e): " in text
    again = json.loads(json.dumps(asdict(report)))
    assert again["engines"][0]["budget"]["missing_bytes"] == report.engines[0].budget.missing_bytes


def test_weights_alone_beyond_a_device_are_one_problem_with_larger_machines_to_choose_from() -> None:
    (engine,) = said_of("llama3-70b", "v5e:1x1", Config(role="unified")).engines
    assert len(engine.problems) == 1
    changes = [remedy.change for remedy in engine.remedies]
    assert changes[0].startswith("--tp 2 (2 x TPU v5p, 95.74 GiB each)"), "eight v5e chips, which are a host, hold no 70B"
    assert any(change.startswith("--tp 2 (2 x NVIDIA H200, 139.8 GiB each)") for change in changes)
    assert engine.times == ()


@pytest.mark.parametrize("kv_dtype", ["auto", "float32"])
def test_a_remedy_tells_of_what_the_changed_command_would_have(kv_dtype: str) -> None:
    wide = Config(role="unified", model=ModelConfig(dtype="float32", kv_cache_dtype=kv_dtype))
    (refused,) = said_of("llama3-8b", "v6e:1x1", wide).engines
    (remedy,) = [each for each in refused.remedies if each.change == "--dtype bfloat16"]
    (changed,) = said_of("llama3-8b", "v6e:1x1", replace(wide, model=replace(wide.model, dtype="bfloat16"))).engines
    assert remedy.kv_tokens == changed.budget.kv_tokens


def test_a_remedy_that_shortens_the_context_says_so() -> None:
    text = render(said_of("llama3-8b", "v5e:1x1", Config(role="unified")), explain=False)
    remedies = [line for line in text.splitlines() if line.startswith("would fit: ")]
    shorter = [line for line in remedies if line.endswith(", a context shorter than the 8,192 wanted")]
    assert shorter == [line for line in remedies if "of 8,192" not in line]
    assert shorter[0].startswith("would fit: --device-memory-utilization 0.98: ")
    assert len(shorter) < len(remedies)


def test_workers_that_share_a_device_must_fit_it_together() -> None:
    config = Config(role="local", local=LocalConfig(num_prefill=1, num_decode=1))
    alone = said_of("llama3-8b", "h200", replace(config, role="unified"))
    both = said_of("llama3-8b", "h200", config)
    assert alone.fits
    assert not both.fits
    assert both.problems[0].startswith("2 engines share a device and take ")
    shared = said_of("llama3-8b", "h200", replace(config, cache=CacheConfig(kv_cache_bytes=24 * 2**30)))
    assert shared.fits


def test_colocated_engines_on_one_device_share_what_one_process_may_use() -> None:
    config = Config(role="colocated", cache=CacheConfig(kv_cache_bytes=24 * 2**30))
    assert said_of("llama3-8b", "h200:1", config).fits
    wide = replace(config, cache=CacheConfig(kv_cache_bytes=40 * 2**30))  # fits the device, not the runtime's share of it
    (problem,) = said_of("llama3-8b", "h200:1", wide).problems
    assert "GiB of its 104.85" in problem


@pytest.mark.parametrize("cache", [CacheConfig(device_memory_utilization=0.45), CacheConfig(kv_cache_bytes=40 * 2**30)])
def test_the_sizes_that_are_advised_for_colocated_engines_on_one_device_fit_and_shares_are_not_advised(
    cache: CacheConfig,
) -> None:
    config = Config(role="colocated", cache=cache)
    (problem,) = said_of("llama3-8b", "h200:1", config).problems
    assert "--device-memory-utilization" not in problem
    found = re.search(r"--num-pages (\d+) or --kv-cache-bytes (\d+) at most", problem)
    assert found is not None
    pages, num_bytes = int(found[1]), int(found[2])
    for sizes in (CacheConfig(num_pages=pages), CacheConfig(kv_cache_bytes=num_bytes)):
        assert said_of("llama3-8b", "h200:1", replace(config, cache=sizes)).fits
    assert not said_of("llama3-8b", "h200:1", replace(config, cache=CacheConfig(num_pages=pages + 1))).fits


def test_colocated_engines_may_take_shares_of_devices_of_their_own() -> None:
    assert said_of("llama3-8b", "h200:2", Config(role="colocated")).fits


def test_what_no_pools_leave_room_for_is_said_of_colocated_engines() -> None:
    config = Config(role="colocated", scheduler=SchedulerConfig(max_num_batched_tokens=4096))
    (problem,) = said_of("llama3-8b", "v6e:1x1", config).problems
    assert problem.endswith("their weights leave no room for pools: give them devices of their own")


def test_page_tables_that_are_too_long_for_the_kernels_are_a_problem_and_larger_pages_would_fit(tmp_path: Path) -> None:
    long = {**read_model_config(str(MODELS / "llama3-8b.json")), "max_position_embeddings": 2**22, "num_hidden_layers": 2}
    (tmp_path / "long.json").write_text(json.dumps(long))
    report = said_of(str(tmp_path / "long"), "v6e:1x1", Config(role="unified"))
    (engine,) = report.engines
    (problem,) = engine.problems
    assert problem.startswith("--page-size: got 16, ")
    assert not report.fits
    (remedy,) = [each for each in engine.remedies if each.change.startswith("--page-size ")]
    assert f"give {remedy.change.removeprefix('--page-size ')}," in problem
    assert engine.limits == (), "memory is none"


def test_pages_that_exact_cannot_take_are_a_problem_with_those_that_it_can() -> None:
    config = Config(role="unified", model=ModelConfig(numerics=Numerics.EXACT), cache=CacheConfig(page_size=48))
    (engine,) = said_of("llama3-8b", "v6e:2x2", config).engines
    assert engine.problems[0].startswith("--page-size: got 48, wanted 16, 32, 64, 128 or 256 for --numerics exact on TPU")
    assert any(remedy.change == "--page-size 16" for remedy in engine.remedies)


def test_a_step_is_bound_by_the_slowest_of_memory_arithmetic_and_links() -> None:
    roofline = of_8b("h200")
    assert roofline.form.num_params == 8_030_261_248
    decode = roofline.time(Workload(phase="decode", rows=32, tokens=32, context=1024))
    assert decode is not None
    read = 2 * (8_030_261_248 - 128256 * 4096)  # all weights but the embedding's other rows
    kv = 32 * (1024 + 1) * 131072  # 128 KiB a token, one of them written
    assert decode.num_bytes == read + kv + 8 * 32 * 128256
    assert decode.flops == 32 * read + 4 * 32 * 1024 * 32 * 4096
    assert (decode.bound_by, decode.interconnect_s) == ("memory", 0.0)
    assert decode.step_s == pytest.approx(decode.num_bytes / 4.8e12)
    prefill = roofline.time(Workload(phase="prefill", rows=1, tokens=4096, context=4096))
    assert prefill is not None
    assert prefill.bound_by == "arithmetic"


@pytest.mark.parametrize("window", [None, 3, 8, 20])
def test_tokens_of_a_prompt_see_the_keys_before_them_within_their_window(window: int | None) -> None:
    prompt = Workload(phase="prefill", rows=1, tokens=8, context=8)
    assert roofline._seen_keys(prompt, window) == sum(min(place, window or 8) for place in range(1, 9))
    decode = Workload(phase="decode", rows=4, tokens=4, context=8)
    assert roofline._seen_keys(decode, window) == 4 * min(8, window or 8)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_what_limits_decode_is_told_however_few_rows_a_step_has(numerics: Numerics) -> None:
    config = Config(
        role="unified", model=ModelConfig(numerics=numerics, max_model_len=512), scheduler=SchedulerConfig(max_num_seqs=32)
    )
    (engine,) = said_of("llama3-8b", "h200:1", config).engines
    assert "decode: memory bandwidth" in engine.limits
    is_measured = numerics is Numerics.FAST
    assert [time.expected_s is not None for time in engine.times] == [is_measured] * len(engine.times)


@pytest.mark.parametrize(
    ("phase", "rows", "tokens", "context", "measured_ms"),  # of gpu_check's sections `decode` and `prefill` on an H200
    [
        ("decode", 8, 8, 1024, 5.11),
        ("decode", 8, 8, 8192, 7.104),
        ("decode", 32, 32, 1024, 6.312),
        ("decode", 32, 32, 8192, 13.68),
        ("decode", 128, 128, 1024, 11.12),
        ("decode", 128, 128, 6791, 32.49),
        ("prefill", 1, 512, 512, 16.81),
        ("prefill", 1, 2048, 2048, 57.5),
        ("prefill", 1, 4096, 4096, 118.0),
        ("prefill", 1, 8192, 8192, 269.8),
    ],
)
def test_steps_that_were_measured_are_foretold_within_a_quarter(
    phase: str, rows: int, tokens: int, context: int, measured_ms: float
) -> None:
    time = of_8b("h200").time(Workload(phase=phase, rows=rows, tokens=tokens, context=context))
    assert time is not None
    assert time.expected_s == pytest.approx(measured_ms / 1e3, rel=0.25)
    assert time.expected_s > time.step_s, "nothing is faster than the bound"


def test_a_decode_step_of_few_layers_takes_as_long_as_its_call() -> None:
    four_layers = of_8b("h200", num_layers=4)  # as gpu_check's section `aot` has them
    decode = four_layers.time(Workload(phase="decode", rows=4, tokens=4, context=1024))
    prefill = four_layers.time(Workload(phase="prefill", rows=1, tokens=64, context=64))
    assert decode is not None
    assert prefill is not None
    assert decode.expected_s == pytest.approx(2.214e-3, rel=0.25)
    assert prefill.expected_s is not None
    assert prefill.expected_s < 1e-3, "the call of a prefill step was not measured"


def test_nothing_is_expected_of_devices_that_were_never_measured() -> None:
    time = of_8b("h100").time(Workload(phase="decode", rows=8, tokens=8, context=1024))
    assert time is not None
    assert time.expected_s is None


def of_8b(accelerator: str, num_layers: int = 32) -> Roofline:
    spec = ModelSpec.from_config(read_model_config(str(MODELS / "llama3-8b.json")) | {"num_hidden_layers": num_layers})
    form = ModelForm(spec=spec, dtype="bfloat16", kv_dtype="bfloat16", layer_loop=LayerLoop.UNROLLED)
    mesh = planned_mesh("cuda", 1)
    return Roofline(form, mesh, form.layout(mesh, 16), read_accelerators()[accelerator])
