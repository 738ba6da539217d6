"""What the documentation names exists: flags, files, metrics."""

import json
import re
from pathlib import Path

import pytest

from jdisagg.aot.command import build_parser as build_aot_parser
from jdisagg.core.flags import ROLES
from jdisagg.core.metrics import Metrics
from jdisagg.core.settings import build_parser, load_config

ROOT = Path(__file__).parents[3]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_OPTION = re.compile(r'add_argument\(\s*"(--[a-z-]+)"')
OF_SCRIPTS = {option for path in (ROOT / "scripts").rglob("*.py") for option in _OPTION.findall(path.read_text())}
OF_BATCH = set(_OPTION.findall((ROOT / "jdisagg" / "batch" / "command.py").read_text()))
OF_AOT = {option for action in build_aot_parser()._actions for option in action.option_strings}
OTHER_PROGRAMS = {
    "--no-deps",
    "--once",
    "--out",
    "--allow-cpu",
    "--test",
    "--quick",
    "--input",
    "--output",
    "--accelerator",
    "--task",
    "--why",
    "--json",
    "--requests",
    "--inject",
    "--nano-vllm",
    *("--model", "--tokenizer", "--url", "--endpoint-type", "--streaming", "--concurrency", "--request-count"),  # of aiperf
    *("--synthetic-input-tokens-mean", "--output-tokens-mean", "--extra-inputs", "--use-server-token-count"),
    "--per-chunk-usage",
    *("--backend", "--data", "--profile", "--constraint"),  # of guidellm
    *("--tasks", "--batch", "--apply"),  # of lm-eval, up to the underscore
    *("--base-url", "--dataset-name", "--random-input-len", "--random-output-len", "--random-range-ratio"),  # of sglang
    *("--num-prompts", "--request-rate"),
    *("--no-cache-dir", "--no-deps", "--no-index", "--only-binary", "--platform", "--python-version", "--target"),  # of pip
}


@pytest.fixture(params=DOCS, ids=lambda path: path.name)
def text(request: pytest.FixtureRequest) -> str:
    return request.param.read_text()


def test_every_flag_named_exists(text: str) -> None:
    known = (
        {option for action in build_parser()._actions for option in action.option_strings}
        | OTHER_PROGRAMS
        | OF_SCRIPTS
        | OF_BATCH
        | OF_AOT
    )
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


def test_every_file_named_exists(text: str) -> None:
    named = set(re.findall(r"(?<![\w/.-])(?:jdisagg|scripts|configs|docs|tests|pallas_kernels)/[\w./-]*\w", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_metric_named_exists_and_operations_names_every_metric() -> None:
    exposed = {line.split()[2] for line in Metrics().text().splitlines() if line.startswith("# TYPE")}
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(jdisagg_\w+)`", text))
    assert named <= exposed
    phases = {f"jdisagg_request_{phase}_seconds" for phase in re.findall(r"`\.\._(\w+)_seconds`", text)}
    own = {name for name in exposed if name.startswith("jdisagg_")}
    assert own <= named | phases
    assert exposed - own == set(re.findall(r"`(process_\w+)`", text)), "the library's own"


def test_containers_of_the_manifests_have_settings_that_load() -> None:
    lists = re.findall(r"\bargs: (\[.*?\])", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    manifests = [[flag.replace("$(POD_IP)", "fd00::7") for flag in json.loads(text)] for text in lists]
    assert [load_config(argv, {}).role for argv in manifests] == ["router", "prefill"]
    decode = [flag.replace("prefill", "decode") for flag in manifests[1]]
    assert load_config(decode, {}).role == "decode"


def test_the_readme_names_every_role() -> None:
    text = (ROOT / "README.md").read_text()
    assert [role for role in ROLES if f"| `{role}` |" not in text] == []
