"""Which version of this package runs."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

_PACKAGE = "jdisagg"
_ROOT = Path(__file__).parents[3]


def package_version(root: Path = _ROOT) -> str:
    """That of the checkout `root`, where it is one: what is installed beside it may be older. Else the installed one."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("project", {})
    except (OSError, ValueError):  # no checkout, or not ours to complain of
        project = {}
    if project.get("name") == _PACKAGE and "version" in project:
        return str(project["version"])
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return "unknown"
