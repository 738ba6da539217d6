"""Whole steps through the real compilers: what must hold of every step holds, and a step that copies its cache is caught.

In processes of their own: libtpu writes where it likes and ends a process when it is not content.
JDISAGG_GATES=steps or all compiles the larger matrices; JDISAGG_GATES=h200 adds the GPU, where its compiler is installed.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

EXTENT = os.environ.get("JDISAGG_GATES", "few")
TIMEOUT_S = {"few": 600, "steps": 3600, "all": 7200}.get(EXTENT, 600)
# where libtpu exists it is a dependency of the tests: without it they fail, they are not skipped
needs_libtpu = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="there is no libtpu")
needs_cuda = pytest.mark.skipif(
    EXTENT != "h200" or importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="JDISAGG_GATES is not h200, or jax-cuda13-plugin is not installed",
)
PLANTED = """
import os, sys
from dataclasses import replace
from jdisagg.aot.environment import prepare_compilers
prepare_compilers(os.environ)
from jdisagg.aot import gates
from jdisagg.aot.abstract import AbstractEngine
from jdisagg.aot.compiled import compile_step
class TokensMajor(AbstractEngine):
    @property
    def layout(self):
        return replace(self.form.layout(self.mesh, self.page_size), heads_major=False)
case = gates.Case(topology="v6e:2x4", tp=4, head_dim=128, steps=("decode",))
good = gates.gate_engine(case)
bad = TokensMajor(form=good.form, mesh=good.mesh, page_size=good.page_size, sizes=good.sizes)
decode = [each for each in bad.executables() if each.name == "decode"][-1]
gate = gates.Gate(topology=case.topology, tp=4, head_dim=128, kv_dtype="bfloat16", step=compile_step(bad, decode))
print(gates.render_gates([gate]))
sys.exit(0 if gate.failures else 1)
"""

OLD_DRIVER = """
import os, sys
from jdisagg.aot.environment import prepare_compilers
prepare_compilers(os.environ)
from jdisagg.aot import gates
from jdisagg.aot.accelerators import Accelerator
new = Accelerator.target_text
Accelerator.target_text = lambda self: new(self).replace('driver_version: "13.0.0"', 'driver_version: "12.2.0"')
found = gates.run_case(gates.Case(topology="h200:1", tp=1, head_dim=128, steps=("decode",)), print)
print(gates.render_gates(found))
"""

JOINED = """
import os, sys
from jdisagg.aot.environment import prepare_compilers
prepare_compilers(os.environ)
from jdisagg.aot import gates
from jdisagg.engine import compile_options
compile_options._EXACT = {name: value for name, value in compile_options._EXACT.items() if "dot_merger" not in name}
found = gates.run_case(gates.Case(topology="h200:1", tp=1, head_dim=64, steps=("exact",)), print)
print(gates.render_gates(found))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter without the settings of this one's jax."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@needs_libtpu
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_steps_stay_in_place_and_copy_neither_cache_nor_weights_on_any_tpu(tmp_path: Path) -> None:
    extent = EXTENT if EXTENT in ("steps", "all") else "few"
    done = run_python("-m", "jdisagg.aot", "--gates", extent, "--json", str(tmp_path / "gates.json"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    gates = json.loads((tmp_path / "gates.json").read_text())["gates"]
    assert {gate["topology"].partition(":")[0] for gate in gates} == {"v5e", "v5p", "v6e", "tpu7x"}
    kinds = {(gate["step"]["name"], gate["kv_dtype"]) for gate in gates}
    assert kinds >= {(name, dtype) for name in ("prefill", "decode", "export", "import") for dtype in ("bfloat16", "int8")}
    for gate in gates:
        assert gate["step"]["cache_bytes"] >= 256 * 2**20
        if (gate["step"]["name"], gate["head_dim"], gate["kv_dtype"]) == ("decode", 128, "bfloat16"):
            assert gate["step"]["program"]["kernels"], "attention of a decode step is a kernel of ours"


@needs_libtpu
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_step_over_a_cache_in_the_wrong_axis_order_does_not_pass() -> None:
    done = run_python("-c", PLANTED)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "0 of 1 gates hold" in done.stdout


@needs_libtpu
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_decode_over_a_large_vocabulary_needs_no_more_than_the_engine_keeps(tmp_path: Path) -> None:
    model = {"architectures": ["LlamaForCausalLM"], "vocab_size": 151936, "hidden_size": 256, "intermediate_size": 512}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(model | {"max_position_embeddings": 2048}))
    question = f"--model {tmp_path} --topology v6e:1x1 --max-num-seqs 128 --max-num-batched-tokens 128"
    role = "--role decode --prefill p:1 --local-prefill never"
    done = run_python("-m", "jdisagg.aot", *question.split(), *role.split(), "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (engine,) = json.loads((tmp_path / "report.json").read_text())["engines"]
    decode = next(step for step in engine["steps"] if step["name"] == "decode")
    state = decode["donated_bytes"] - decode["cache_bytes"]
    assert state > 2 * 4 * 128 * 151936
    needs = state + decode["padding_bytes"] + decode["temp_bytes"] + decode["fresh_bytes"]  # beside its code
    assert needs <= engine["budget"]["steps_bytes"]


@needs_cuda
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_steps_stay_in_place_on_an_h200() -> None:
    done = run_python("-m", "jdisagg.aot", "--gates", "steps", "--topology", "h200:1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@needs_cuda
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_conditions_that_a_driver_leaves_to_the_host_do_not_pass() -> None:
    done = run_python("-c", OLD_DRIVER)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "the host leads 2 kConditional" in done.stdout


@needs_cuda
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_weights_that_are_joined_in_every_step_do_not_pass() -> None:
    done = run_python("-c", JOINED)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "copy of a weight bf16[1024,6144]" in done.stdout
