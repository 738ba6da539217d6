"""What a GPU's host leads, read from lists as XLA:GPU writes them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jdisagg.aot.thunks import UNTOLD, compile_with_list, led

GRAPHS = """000: kCommandBuffer [source       | next=005 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_pad_fusion grid: [72, 1, 1] threads: [128, 1, 1]
    003: kConditional  [prev=001 (1) | sink        ]
      false_branch:
        002: kCustomKernel [source | sink] loop_slice_fusion
004: kAllReduce     [prev=000 (1) | next=005 (1)] kAllReduce
005: kCommandBuffer [prev=004 (1) | sink        ]
"""
LED = """010: kConditional   [prev=005 (1) | next=013 (1)]
      true_branch:
        011: kConditional   [source | sink]
012: kConditional   [prev=010 (1) | next=013 (1)]
013: kWhile         [prev=012 (1) | sink        ]
"""


def test_the_host_leads_conditions_and_loops_that_are_in_no_graph() -> None:
    assert led(GRAPHS) == ()
    assert led(GRAPHS + LED) == ("2 kConditional", "1 kWhile")
    assert led("") == (UNTOLD,)


def test_a_compiler_that_writes_no_such_list_compiles_all_the_same_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32))
    compiled, launched = compile_with_list(lowered)
    assert (compiled(jnp.zeros(4, jnp.float32)).tolist(), launched) == ([1.0] * 4, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_graphs", [True, False])
def test_the_list_is_that_of_what_is_launched_not_of_what_was_before_the_graphs(has_graphs: bool) -> None:
    class Lowered:
        """Writes what XLA:GPU writes."""

        def compile(self, compiler_options: dict[str, object]) -> str:
            folder = Path(str(compiler_options["xla_dump_to"]))
            (folder / "module_0001.jit_decode.thunk_sequence.txt").write_text(LED)
            if has_graphs:
                (folder / "module_0001.jit_decode.thunk_sequence_after_thunk_passes.txt").write_text(GRAPHS)
            return "compiled"

    assert compile_with_list(Lowered()) == ("compiled", GRAPHS if has_graphs else LED)
