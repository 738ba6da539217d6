"""What the documentation names exists: flags, files, metrics, links. What its readers need it names, as the code has it."""

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from jdisagg.aot.command import build_parser as build_aot_parser
from jdisagg.api.http.openapi import openapi_document
from jdisagg.core.errors import RequestError
from jdisagg.core.flags import BY_NAME, FLAGS, ROLES
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import FinishReason, Role
from jdisagg.core.settings import SECTION_TYPES, build_parser
from jdisagg.handoff.borrower import Outcome
from jdisagg.roles.stages import Stage
from jdisagg.sched.states import LIVE

ROOT = Path(__file__).parents[3]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_OPTION = re.compile(r'add_argument\(\s*"(--[a-z-]+)"')
OF_SCRIPTS = {option for path in (ROOT / "scripts").rglob("*.py") for option in _OPTION.findall(path.read_text())}
OF_BATCH = set(_OPTION.findall((ROOT / "jdisagg" / "batch" / "command.py").read_text()))
OF_FLEET = set(_OPTION.findall((ROOT / "jdisagg" / "fleet.py").read_text()))
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
    "--version",  # of serve, beside its settings
    *("--model", "--tokenizer", "--url", "--endpoint-type", "--streaming", "--concurrency", "--request-count"),  # of aiperf
    *("--synthetic-input-tokens-mean", "--output-tokens-mean", "--extra-inputs", "--use-server-token-count"),
    "--per-chunk-usage",
    *("--backend", "--data", "--profile", "--constraint"),  # of guidellm
    *("--tasks", "--batch", "--apply"),  # of lm-eval, up to the underscore
    *("--base-url", "--dataset-name", "--random-input-len", "--random-output-len", "--random-range-ratio"),  # of sglang
    *("--num-prompts", "--request-rate"),
    *("--gpus", "--name", "--network", "--restart", "--shm-size", "--stop-timeout", "--ulimit"),  # of docker
    *("--now", "--from-literal"),  # of systemctl and kubectl
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
        | OF_FLEET
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


def test_the_readme_names_every_role() -> None:
    text = (ROOT / "README.md").read_text()
    assert [role for role in ROLES if f"| `{role}` |" not in text] == []


def test_links_lead_somewhere(text: str, request: pytest.FixtureRequest) -> None:
    here = request.node.callspec.params["text"]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    dead = []
    for link in links:
        name, _, anchor = link.partition("#")
        page = (here.parent / name).resolve() if name else here
        if not page.exists() or (anchor and anchor not in anchors(page)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("operations.md", ["Alerts and a dashboard", "Upgrades"]),
        ("deployment.md", ["TPU hosts", "Prometheus"]),
        ("api.md", ["Structured output", "A gRPC client"]),
        ("testing.md", ["The network between hosts"]),
    ],
)
def test_a_long_page_begins_with_a_list_of_its_headings_in_their_order(name: str, there: list[str]) -> None:
    page = ROOT / "docs" / name
    _, *others = headings(page)
    contents = page.read_text().partition("\n## ")[0]
    assert re.findall(r"^ *- \[(.+)\]\(#.+\)$", contents, re.MULTILINE) == others
    assert [title for title in others if title in there] == there


@pytest.mark.parametrize(
    "link",
    [
        *("configs/prometheus", "docs/aot.md#topologies", "docs/deployment.md"),
        *("docs/api.md#structured-output", "docs/operations.md#upgrades"),
    ],
)
def test_the_readme_leads_to_what_a_first_try_stumbles_over(link: str) -> None:
    assert f"]({link})" in (ROOT / "README.md").read_text()


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are linked to."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings(page)}


def headings(page: Path) -> list[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"^#+ (.*)$", prose, re.MULTILINE)


def test_every_flag_is_named_somewhere() -> None:
    text = all_pages()
    assert [flag.option for flag in FLAGS if not re.search(rf"--(?:no-)?{flag.option[2:]}(?![\w-])", text)] == []


def test_defaults_are_those_of_the_code() -> None:
    """`--flag` (10), and the table of the README."""
    said = list(re.findall(r"`--([a-z-]+)` \(([\d.]+(?: MiB)?)(?: s)?[);,]", all_pages()))
    for line in re.findall(r"^\| (`--.*)", (ROOT / "README.md").read_text(), re.MULTILINE):
        names, default = line.split(" | ")[:2]
        options = re.findall(r"`--([a-z-]+)`", names.split(" (")[0])
        given = [value.strip("` ") for value in default.split(", ")]
        if len(given) in (1, len(options)) and " " not in default.strip("| ").replace(", ", ""):
            said += zip(options, given * len(options) if len(given) == 1 else given, strict=False)
    ours = [(name, value) for name, value in said if name.replace("-", "_") in BY_NAME and value[:2] not in ("", "--")]
    assert len(ours) > 30
    assert [(name, value, default_of(name)) for name, value in ours if value not in default_of(name)] == []


def default_of(option: str) -> tuple[str, ...]:
    """In the words that the pages have for it."""
    flag = BY_NAME[option.replace("-", "_")]
    default = getattr(SECTION_TYPES[flag.section](), flag.name)
    if default is None or default == ():
        return ("none",)
    if isinstance(default, bool):
        return ("on" if default else "off",)
    if flag.syntax == "bytes" and default:
        return (f"{default // 2**20} MiB",)
    return (f"{default:g}",) if isinstance(default, float) else (str(default.value if isinstance(default, Enum) else default),)


def test_flags_for_some_roles_alone_are_in_a_table_with_these() -> None:
    table = (ROOT / "docs" / "operations.md").read_text().partition("| flags | for `--role` |")[2].partition("\n\n")[0]
    rows = [[re.findall(r"`([\w-]+)`", cell) for cell in row.split("|")[1:3]] for row in table.splitlines()[2:]]
    said = {option: set(roles) for options, roles in rows for option in options}
    assert said == {flag.option: set(flag.only) for flag in FLAGS if flag.only}


def test_every_way_to_fail_is_named_with_both_statuses() -> None:
    rows = (ROOT / "docs" / "api.md").read_text().splitlines()
    statuses = {
        (kind.http_status, kind.grpc_status) for kind in failures(RequestError) if kind.http_status != 409
    }  # of workers
    assert [pair for pair in sorted(statuses) if not any(row.startswith(f"| {pair[0]} | {pair[1]} |") for row in rows)] == []


def failures(kind: type[RequestError]) -> Iterator[type[RequestError]]:
    """`kind` and all below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from failures(below)


def test_every_path_of_the_http_api_is_named() -> None:
    text = all_pages()
    assert [path for path in openapi_document("")["paths"] if not re.search(rf"{re.escape(path)}[`\s]", text)] == []


def test_every_variable_of_the_environment_is_named_where_it_is_set_by_people() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "jdisagg").rglob("*.py"))
    read = set(re.findall(r"\bJDISAGG_[A-Z_]+", sources)) - {"JDISAGG_PARENT_PID"}  # of the supervisor, for its children
    assert read == set(re.findall(r"\bJDISAGG_[A-Z_]+", all_pages())) - {"JDISAGG_SOAK_S", "JDISAGG_KERNEL_GATES"}  # of tests


def test_modules_that_start_threads_are_in_the_list_of_threads() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Which thread runs what")[1].split("\n## ")[0]
    starts = re.compile(r"\bThread\(|\bThreadPoolExecutor\(|\bto_thread\(")
    sources = [path for path in sorted((ROOT / "jdisagg").rglob("*.py")) if starts.search(path.read_text())]
    assert [str(path) for path in sources if not re.search(rf"[/`]{path.name}`", section)] == []


def test_lengths_in_the_reading_path_are_about_right() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| \[(.+)\]\(\.\./jdisagg/(.+)\) \((\d+)\) \| .{20}", text, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 23))
    assert {name for _, name, link, _ in rows if name != link} == set()
    said = {name: int(lines) for _, name, _, lines in rows}
    assert f"{len(rows)} files, {sum(said.values()):,} lines" in text
    assert too_far_off(said) == {}


def test_lengths_of_packages_are_about_right() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    said = {name: number(lines) for name, lines in re.findall(r"^\d\. `(\w+)` \((\d[\d,]+)(?: lines)?\):", text, re.MULTILINE)}
    assert list(said) == ["roles", "sched", "kv", "handoff", "engine", "transfer"]
    assert too_far_off(said) == {}
    (engine,) = map(number, re.findall(r"the engine first, ([\d,]+) lines", text))
    (around,) = map(number, re.findall(r"`api`, `router` and `serve`, ([\d,]+) lines", text))
    assert abs(engine - sum(lines for name, lines in said.items() if name != "transfer")) <= 100
    assert too_far_off({"api router serve": around}) == {}


def too_far_off(said: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Of files or packages, those whose lines differ by more than 15 % from what is said of them; and what they are."""
    real = {names: sum(map(num_lines, names.split())) for names in said}
    return {names: (lines, real[names]) for names, lines in said.items() if abs(lines / real[names] - 1) > 0.15}


def number(text: str) -> int:
    """Of "11,900"."""
    return int(text.replace(",", ""))


def num_lines(name: str) -> int:
    """Of a file, or of all in a package."""
    path = ROOT / "jdisagg" / name
    paths = [path] if path.suffix else list(path.rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in paths)


def all_pages() -> str:
    return "\n".join(path.read_text() for path in DOCS)


def shown(metric: str, label: str) -> set[str]:
    """Values that a worker shows from the start."""
    return set(re.findall(rf'^jdisagg_{metric}{{{label}="(\w+)"}}', Metrics().text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("jdisagg_requests", {status.value for status in LIVE}),
        ("jdisagg_requests_finished_total", {*(end.value for end in FinishReason), *RequestError.reasons(), "refused"}),
        ("jdisagg_tick_seconds_total", {stage.value for stage in Stage}),
        ("jdisagg_borrowings_total", {outcome.value for outcome in Outcome}),
        ("jdisagg_recoveries_total", shown("recoveries_total", "rung") | {"replay"}),
        ("jdisagg_prefill_hedges_total", shown("prefill_hedges_total", "outcome")),
        ("jdisagg_workers", {role.value for role in Role}),
    ],
)
def test_the_table_of_metrics_explains_every_value_of_a_label(metric: str, values: set[str]) -> None:
    rows = (ROOT / "docs" / "operations.md").read_text().splitlines()
    assert values
    (row,) = [row for row in rows if row.startswith("| `jdisagg_") and f"`{metric}`" in row.split(" | ")[0]]
    assert [value for value in sorted(values) if not re.search(rf"\b{value}\b", row.split(" | ", 1)[1])] == []


def test_every_script_that_people_start_is_named() -> None:
    inner = {"checks.py", "check_proto.sh", "fleet_process.py", "panes.py"}  # of other scripts
    paths = [path for path in sorted((ROOT / "scripts").iterdir()) if path.suffix in (".py", ".sh") and path.name not in inner]
    wrapped = {path.stem for path in paths if path.suffix == ".sh"}  # by a script of that name
    text = all_pages() + (ROOT / "jdisagg" / "demo" / "README.md").read_text()
    people = [path.name for path in paths if path.suffix == ".sh" or path.stem not in wrapped]
    assert [name for name in people if name not in text] == []
