"""The demo corpus: the running interpreter's standard library, a held-out part, and chat documents made from it."""

from __future__ import annotations

import ast
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from demo_model.chat import render

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})
HELD_OUT_EVERY = 20
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You write Python code.", "You explain Python code.")


@dataclass(frozen=True)
class Module:
    """One source file: path relative to the library, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Modules sorted by path; every 20th is held out of training and of the tokenizer."""

    train: tuple[Module, ...]
    held_out: tuple[Module, ...]


def load_corpus() -> Corpus:
    """Read every module of the running interpreter's library that is not a test."""
    root = Path(sysconfig.get_path("stdlib"))
    modules: list[Module] = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            modules.append(Module(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace")))
    modules = [module for module in modules if module.text.strip()]
    held_out = tuple(modules[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    train = tuple(module for i, module in enumerate(modules) if (i + 1) % HELD_OUT_EVERY)
    return Corpus(train, held_out)


def chat_documents(modules: tuple[Module, ...], *, count: int, seed: int) -> list[str]:
    """Conversations about documented functions: write one from its docstring, or say what one does."""
    rng = random.Random(seed)
    functions = [found for module in modules for found in _documented_functions(module)]
    rng.shuffle(functions)
    return [_conversation(rng, *function) for function in functions[:count]]


def _documented_functions(module: Module) -> list[tuple[str, str, str]]:
    """(signature, summary, source without indentation) of functions of at most 1,500 characters."""
    try:
        tree = ast.parse(module.text)
    except SyntaxError:  # the library ships templates and deliberately odd files
        return []
    found: list[tuple[str, str, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        source = ast.get_source_segment(module.text, node)
        if source is None or not 80 < len(source) < 1500:
            continue
        indent = " " * node.col_offset
        body = "\n".join(line.removeprefix(indent) for line in source.splitlines())
        found.append((f"{node.name}({ast.unparse(node.args)})", doc.strip().split("\n\n")[0], body))
    return found


def _conversation(rng: random.Random, signature: str, summary: str, source: str) -> str:
    code = f"```python\n{source}\n```"
    question, answer = rng.choice(
        (
            (f"Write a Python function `{signature}`.\n\n{summary}", code),
            (f"Write the function {signature.partition('(')[0]}: {summary}", code),
            (f"What does this function do?\n\n{code}", summary),
        )
    )
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if rng.random() < 0.25:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return render(messages)
