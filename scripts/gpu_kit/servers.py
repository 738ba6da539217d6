"""The workers of one section: flags, READY, counters, and an end for all of them."""

from __future__ import annotations

from contextlib import closing

from bench_kit.servers import Server, Servers

from gpu_kit.findings import Findings
from gpu_kit.setting import Setting
from gpu_kit.shapes import served_shape

SHARE = 0.4  # of the device's memory, for each of two processes on it
COLOCATED_BYTES, SMALL_COLOCATED_BYTES = "16GiB", "64MiB"  # two pools in one process cannot both take a share of what is free
DEAD_AFTER_S, PATIENT_S = 2.0, 20.0  # patient on a CPU that all processes share: there one that stands still is not dead
STEP_TIMEOUT_S = 60.0


def servers(setting: Setting) -> closing[Servers]:
    """Workers that end with the block."""
    return closing(Servers(setting.log, setting.clock.left_s, "--step-timeout-s", str(STEP_TIMEOUT_S), "--drain-s", "2"))


def engine_flags(setting: Setting, *, share: bool = True) -> tuple[str, ...]:
    """Equal for every engine whose streams are compared: the same model, the same executables."""
    scale, small = setting.scale, setting.small
    longest = max(*scale.ttft_prompts, 3 * scale.prompt_tokens[1]) + 64
    pool = ("--kv-cache-bytes", SMALL_COLOCATED_BYTES if small else COLOCATED_BYTES)
    model = served_shape(small=small).write(setting.scratch / "served", longest)
    return (
        *("--model", str(model), "--load-format", "dummy", "--served-model-name", "check", "--numerics", "exact"),
        *("--dtype", "float32" if small else "bfloat16", "--max-model-len", str(longest), "--page-size", "16"),
        *("--max-num-seqs", str(scale.at_once), "--max-num-batched-tokens", "64" if small else "512"),
        *("--transfer-chunk-tokens", "32" if small else "256", "--dead-after-s", str(PATIENT_S if small else DEAD_AFTER_S)),
        *(("--device-memory-utilization", str(SHARE)) if share else pool),
    )


def check_compiles(server: Server, findings: Findings, name: str) -> None:
    """Nothing compiles after READY."""
    after = server.counters()["jdisagg_compiles_after_ready_total"]
    findings.check(f"{name}: nothing compiled after READY", after == 0, f"{after:g} compilations")


def check_bits(findings: Findings, **bits: str | None) -> None:
    """All of these, by who computes them, are the same; the detail shows whose are off."""
    said = ", ".join(f"{who} {bits_of}" for who, bits_of in bits.items())
    findings.check(f"{', '.join(bits)} compute the same bits", None not in bits.values() and len({*bits.values()}) == 1, said)


def end(server: Server, findings: Findings, name: str) -> None:
    """SIGTERM; it has to leave with status 0."""
    server.client.close()
    status = server.process.stop()
    findings.check(f"{name} ends well", status == 0, f"exit status {status}")
