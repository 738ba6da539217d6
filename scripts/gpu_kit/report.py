"""The report as JSON and Markdown."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_kit.machine import commit

from gpu_kit.findings import NOT_RUN
from gpu_kit.runner import Result
from gpu_kit.sections import BY_NAME

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "numpy", "grpcio", "tokenizers"),
    *("torch", "transformers"),
)


def make_report(results: Sequence[Result], *, small: bool) -> dict[str, Any]:
    """Everything, as data."""
    device = next((result.found.get("facts", {}) for result in results if result.name == "device"), {})
    return {
        "device": device.get("kind", "unknown"),
        "platform": device.get("platform", "unknown"),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "sizes": "small" if small else "full",
        "sections": [asdict(result) for result in results],
    }


def write_report(report: dict[str, Any], out: Path) -> None:
    """DIR/gpu_check.json and DIR/gpu_check.md."""
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "gpu_check.md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """Targets first, then every section with its checks, figures and tables."""
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    lines = [
        f"# gpu_check: {report['device']}",
        "",
        f"{report['date']}, commit {report['commit']}, Python {report['python']}, {report['cores']} cores, {packages}; "
        f"{report['sizes']} sizes",
        "",
        *_table(
            ("section", "result", "s", "CPU s", "limit s", "what was wrong"), [_section_cells(s) for s in report["sections"]]
        ),
        "",
        "## Targets",
        "",
        *_table(("section", "figure", "got", "wanted", "verdict"), [c for s in report["sections"] for c in _target_cells(s)]),
    ]
    for section in report["sections"]:
        lines += _section_lines(section)
    return "\n".join(lines) + "\n"


def _section_cells(section: dict[str, Any]) -> tuple[str, ...]:
    reason = section["reason"].replace("\n", " ")[-300:]
    figures = (f"{section['seconds']:.1f}", f"{section['cpu_s']:.1f}", f"{section['limit_s']:.0f}")
    return section["name"], section["status"], *figures, reason


def _target_cells(section: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for target in section["found"].get("targets", []):
        got = target["why"] if target["verdict"] == NOT_RUN else f"{shown(target['got'])} {target['unit']}"
        rows.append((section["name"], target["name"], got, target["wanted"], target["verdict"]))
    return rows


def _section_lines(section: dict[str, Any]) -> list[str]:
    found = section["found"]
    says = BY_NAME[section["name"]].says if section["name"] in BY_NAME else ""
    lines = ["", f"## {section['name']}: {section['status']}", "", f"{says}; {section['seconds']:.1f} s", ""]
    for check in found.get("checks", []):
        detail = f": {check['detail']}" if check["detail"] else ""
        lines.append(f"- {'holds' if check['holds'] else 'DOES NOT HOLD'}: {check['name']}{detail}".replace("\n", " "))
    lines += [f"- {name}: {shown(value)}" for name, value in found.get("facts", {}).items()]
    lines += [f"- left out: {part}: {why}".replace("\n", " ") for part, why in found.get("left_out", {}).items()]
    for title, rows in found.get("tables", {}).items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines += ["", f"{title}:", "", *_table(columns, [[shown(row.get(name, "")) for name in columns] for row in rows])]
    return lines


def shown(value: Any) -> str:
    """A figure as people read it."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000 else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in lines]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
