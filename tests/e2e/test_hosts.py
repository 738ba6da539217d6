"""Streams go on while the network between hosts breaks. All cuts, held for longer: scripts/drills.py --part hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path

import pytest
from chaos_kit.catalogue import LONG_MODEL_LEN
from chaos_kit.cuts import CUTS, DECODE, HOSTS, PREFILL
from chaos_kit.network import NoNetwork, way_in
from fleet_process import ROOT

from tests.e2e.processes import environment, run_script
from tests.e2e.tiny_model import make_tiny_model

DRILLS = ("drills.py", "--part", "hosts")
ENDS = ("client", *HOSTS)
CUT_HERE = ("p1 and d1 apart", "d1 unplugged")
STREAMS, LIMIT_S = 24, 500.0  # so many that some are always hit
Pairs = set[tuple[str, str]]


@pytest.fixture(scope="module")
def enter() -> tuple[str, ...]:
    try:
        return way_in()
    except NoNetwork as error:
        pytest.skip(f"no hosts here: {error}")


def around(name: str, ends: tuple[str, ...] = ENDS) -> Pairs:
    return {pair for pair in permutations(ends, 2) if name in pair}


def between(ones: tuple[str, ...], others: tuple[str, ...]) -> Pairs:
    return {*product(ones, others), *product(others, ones)}


LOST: dict[str, Pairs] = {
    "p1 > d1 lost": {("p1", "d1")},
    "d1 > p1 lost": {("d1", "p1")},
    "p1 and d1 apart": between(("p1",), ("d1",)),
    "r > d1 lost": {("r", "d1")},
    "d1 > r lost": {("d1", "r")},
    "r and d1 apart": between(("r",), ("d1",)),
    "p1 > r lost": {("p1", "r")},
    "r and p1 apart": between(("r",), ("p1",)),
    "every p and d apart": between(PREFILL, DECODE),
    "client and r apart": between(("client",), ("r",)),
    "r and all workers apart": between(("r",), (*PREFILL, *DECODE)),
    **{f"{name} {how}": around(name) for name in ("d1", "p1") for how in ("unplugged", "stranded", "loose")},
    **{f"{name}'s address elsewhere": around(name) for name in ("d1", "p1")},
}
REFUSED = {"r > d1 unreachable": "EHOSTUNREACH", "d1 > p1 prohibit": "EACCES", "d1 > p1 blackhole": "EINVAL"}


def wanted(cut: str) -> dict[str, list[str]]:
    if cut in REFUSED:
        return {cut.rpartition(" ")[0]: [REFUSED[cut]] * 2}
    if cut.endswith("takes small frames"):
        return {f"{one} > {other}": ["arrived", "lost"] for one, other in around(cut[:2], HOSTS)}
    return {f"{one} > {other}": ["lost", "lost"] for one, other in LOST[cut]}


@pytest.mark.timeout(LIMIT_S)
def test_every_cut_stops_what_it_says_and_nothing_else_and_heals(enter: tuple[str, ...]) -> None:
    command = [*enter, sys.executable, str(ROOT / "tests" / "e2e" / "cut_probe.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S - 50, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("before") == {}
    assert found.pop("left") == {}
    for cut in CUTS:
        assert found.pop(f"{cut.name}, healed") == {}, cut.name
        # the client sends from the switch itself, which makes small frames where a port wants them
        hit = {pair: fate for pair, fate in found.pop(cut.name).items() if "small" not in cut.name or "client" not in pair}
        assert hit == wanted(cut.name), cut.name
    assert found == {}


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.usefixtures("enter")
def test_the_network_between_hosts_breaks_and_every_stream_is_exact(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_model_len=LONG_MODEL_LEN)
    told = tmp_path / "told.json"
    flags = ("--model", str(model), "--cuts", ",".join(CUT_HERE), "--hold-s", "2.5", "--streams", str(STREAMS))
    done = run_script(*DRILLS, *flags, "--json", str(told), "--directory", str(tmp_path / "logs"), timeout_s=LIMIT_S)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(told.read_text())["hosts"]
    assert [row["cut"] for row in rows] == list(CUT_HERE)
    assert [row["became"] for row in rows] == [{"exact": STREAMS}] * len(CUT_HERE)
    assert any(row["rungs"] for row in rows), "nobody noticed anything"


@pytest.mark.parametrize("tool", ["ip", "unshare", "nsenter"])
def test_without_its_tools_part_hosts_says_which_one_is_missing(tool: str, tmp_path: Path) -> None:
    for other in {"ip", "unshare", "nsenter"} - {tool}:
        (tmp_path / other).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / other).chmod(0o755)
    done = run_script(*DRILLS, timeout_s=60, PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{tool} is missing" in line
