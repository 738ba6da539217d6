"""Every family against transformers: logits of all positions and 64 greedy tokens, whole, chunked and sharded."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jdisagg.core.config import LayerLoop, ModelConfig
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.sharding import make_mesh
from tests.golden.paged import PagedRun, with_scaled_keys, without_rope
from tests.golden.references import FAMILIES, MIN_DISTINCT, NUM_GENERATED, Reference, demo_reference, make_reference

TOLERANCE = 2e-4  # of the largest |logit|: float32 sums in another order, over two layers
SHAPES = {"whole": (112, 16), "single tokens": (8, 1)}  # tokens per step, per tile; all families are fed (16, 4)
SHARDED = ("demo", "llama-tied-bias", "mistral-window", "qwen2-mixed-windows", "qwen3")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    made = {family: make_reference(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    return {**made, "demo": demo_reference()}


def load(reference: Reference, tp: int, loop: LayerLoop = LayerLoop.AUTO) -> tuple[LoadedModel, jax.sharding.Mesh]:
    mesh = make_mesh(jax.devices(), tp)
    return load_model(ModelConfig(model=str(reference.directory), tensor_parallel_size=tp, layer_loop=loop), mesh, seed=0), mesh


def difference(got: np.ndarray, reference: Reference) -> float:
    wanted = reference.logits[: len(got)]
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def test_references_are_worth_comparing_with(references: dict[str, Reference]) -> None:
    for family, reference in references.items():
        assert len(set(reference.greedy)) >= MIN_DISTINCT, family


@pytest.mark.parametrize(
    ("family", "tp"),
    [(family, 1) for family in (*FAMILIES, "demo")]
    + [(family, tp) for family in SHARDED for tp in (2, 4)],  # at 4, kv heads are replicated
)
def test_logits_and_greedy_tokens_equal_transformers(references: dict[str, Reference], family: str, tp: int) -> None:
    reference = references[family]
    model, mesh = load(reference, tp)
    run = PagedRun(model, mesh)
    got = run.feed_chunks(reference.prompt + reference.greedy, chunk=16, tile=4)
    assert difference(got, reference) < TOLERANCE
    run.num_tokens = 0
    assert run.greedy(reference.prompt, NUM_GENERATED, chunk=16, tile=4) == reference.greedy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["mistral-window", "qwen3"])
def test_any_chunking_gives_the_same_logits(references: dict[str, Reference], family: str, shape: str) -> None:
    chunk, tile = SHAPES[shape]
    model, mesh = load(references[family], 1)
    tokens = references[family].prompt + references[family].greedy
    assert difference(PagedRun(model, mesh).feed_chunks(tokens, chunk=chunk, tile=tile), references[family]) < TOLERANCE


@pytest.mark.parametrize("tp", [1, 4])
def test_scan_over_stacked_layers_equals_transformers(references: dict[str, Reference], tp: int) -> None:
    reference = references["mistral-window"]
    model, mesh = load(reference, tp, LayerLoop.SCAN)
    got = PagedRun(model, mesh).feed_chunks(reference.prompt + reference.greedy, chunk=16, tile=4)
    assert difference(got, reference) < TOLERANCE


@pytest.mark.parametrize("fault", ["rope off", "pages swapped", "keys scaled"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_planted_faults_are_seen(references: dict[str, Reference], family: str, fault: str) -> None:
    reference = references[family]
    model, mesh = load(reference, 1)
    if fault == "rope off":
        model = without_rope(model)
    elif fault == "keys scaled":
        model = with_scaled_keys(model)
    run = PagedRun(model, mesh)
    got = [run.feed_chunks(reference.prompt[:32], chunk=16, tile=4)]
    if fault == "pages swapped":
        run.swap_pages(1, 30)  # with a page nothing was written to; the order of written ones would not matter
    got.append(run.feed_chunks((reference.prompt + reference.greedy)[32:], chunk=16, tile=4))
    assert difference(np.concatenate(got), reference) > 10 * TOLERANCE
