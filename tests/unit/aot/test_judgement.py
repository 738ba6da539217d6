"""What compiled steps need of a device."""

from __future__ import annotations

from jdisagg.aot.compiled import CompiledStep
from jdisagg.aot.report import needed_by


def step(name: str, code: int, temp: int = 0, state: int = 0, fresh: int = 0) -> CompiledStep:
    return CompiledStep(
        name=name,
        shape=f"{code} bytes",
        size=1,
        layers=(1,),
        compile_cpu_s=0.0,
        temp_bytes=temp,
        fresh_bytes=fresh,
        code_bytes=code,
        padding_bytes=0,
        donated_bytes=1000 + state,
        aliased_bytes=1000 + state,
        cache_bytes=1000,
    )


def test_the_code_of_executables_that_were_not_compiled_is_that_of_the_largest_of_their_kind() -> None:
    steps = [step("prefill", 100, temp=7, state=3), step("decode", 20, temp=5)]
    assert needed_by(steps, {"prefill": 1, "decode": 1}) == 3 + 7 + 120
    assert needed_by(steps, {"prefill": 4, "decode": 3, "admit": 1}) == 3 + 7 + 4 * 100 + 3 * 20


def test_results_that_lie_in_no_donated_array_count_with_the_temporaries_of_their_step() -> None:
    steps = [step("prefill", 100, temp=7, fresh=2), step("decode", 20, temp=5, fresh=30)]
    assert needed_by(steps, {"prefill": 1, "decode": 1}) == 5 + 30 + 120


def test_code_that_was_compiled_counts_as_it_is() -> None:
    assert needed_by([step("prefill", 100), step("prefill", 60)], {"prefill": 2}) == 160
    assert needed_by([step("prefill", 100), step("prefill", 60)], {"prefill": 3}) == 260
