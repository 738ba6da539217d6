"""What a section names as needed is all that its code imports: a machine that lacks a package skips it by that package's name.

Read from the source: what the section's process imports, and the processes that it starts.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from gpu_kit.sections import SECTIONS, Section

ROOT = Path(__file__).parents[3]
WITH_JAX = ("numpy", "ml_dtypes")  # which jax brings
WORKERS, WORKER = "gpu_kit.servers", "jdisagg.serve"  # who imports the one starts processes of the other


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_section_needs_every_package_that_its_processes_import(section: Section) -> None:
    brought = (*section.needs, *WITH_JAX)
    imported = imports_of("gpu_kit.child", section.module)
    lacked = {name: place for name, place in imported.items() if not any(f"{name}.".startswith(f"{each}.") for each in brought)}
    assert not lacked


def test_the_source_tells_of_processes_that_are_started() -> None:
    assert "orbax.checkpoint" in imports_of("gpu_kit.pair_section"), "of a worker"
    assert "huggingface_hub" in imports_of("jdisagg.aot"), "of the module that its command line names"


def imports_of(*modules: str) -> dict[str, str]:
    """What of others is imported, and where: in these modules, and in ours that they import or start."""
    found, seen, to_do = dict[str, str](), set[str](), list(modules)
    while to_do:
        if (name := to_do.pop()) in seen or (path := _file_of(name)) is None:
            continue
        seen.add(name)
        to_do += [WORKER] if name == WORKERS else []
        for line, said in _imports(path):
            if _file_of(said) is not None:
                to_do.append(said)
            elif _file_of(said.rpartition(".")[0]) is None and said.partition(".")[0] not in sys.stdlib_module_names:
                found.setdefault(said, f"{path.relative_to(ROOT)}:{line}")
        if name.startswith("gpu_kit.") or path.name == "__main__.py":
            to_do += [text for text in _texts(path) if _file_of(text) is not None]  # for importlib, or behind -m
    return found


@cache
def _imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module or member of one)."""
    return tuple(_imports_in(ast.parse(path.read_text())))


def _imports_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)


def _texts(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@cache
def _file_of(module: str) -> Path | None:
    """Of one of ours; None for those of others."""
    if not module or not module.replace(".", "").isidentifier():
        return None
    for above in (ROOT, ROOT / "scripts"):
        path = above.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if file.is_file():
                return file
    return None
