"""Small evaluation tasks made from the held-out modules: next line of code, and whole texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from demo_model.corpus import Module

CONTEXT_CHARACTERS, TEXT_CHARACTERS = 600, 3000


def write_tasks(directory: Path, modules: tuple[Module, ...], *, count: int, seed: int) -> None:
    """Write choice.jsonl, generate.jsonl (`count` examples each) and perplexity.jsonl (three texts)."""
    rng = random.Random(seed)
    places = [place for module in modules for place in _places(module)]
    rng.shuffle(places)
    lines = [line for _, line in places]
    choices, generations = [], []
    for number, (context, line) in enumerate(places[:count]):
        options = [line, *rng.sample([other for other in lines if other != line], 3)]
        rng.shuffle(options)
        choices.append({"id": f"choice-{number}", "context": context, "choices": options, "answer": options.index(line)})
        generations.append({"id": f"generate-{number}", "prompt": context, "expected": line, "stop": ["\n"], "max_tokens": 32})
    longest = sorted(modules, key=lambda module: -len(module.text))[:3]
    texts = [{"id": module.path, "text": module.text[:TEXT_CHARACTERS]} for module in longest]
    directory.mkdir(parents=True, exist_ok=True)
    for name, examples in (("choice", choices), ("generate", generations), ("perplexity", texts)):
        _write(directory / f"{name}.jsonl", examples)


def _places(module: Module) -> list[tuple[str, str]]:
    """(text before, one line of code without its indentation) for lines deep enough in the module to have a context."""
    places: list[tuple[str, str]] = []
    offset = 0
    for raw in module.text.splitlines(keepends=True):
        code = raw.strip()
        start = offset + len(raw) - len(raw.lstrip(" "))
        if offset > CONTEXT_CHARACTERS and 12 <= len(code) <= 60 and code.isascii() and not code.startswith(("#", '"')):
            before = module.text[:start]
            cut = before.find("\n", start - CONTEXT_CHARACTERS) + 1
            places.append((before[cut:], code))
        offset += len(raw)
    return places


def _write(path: Path, examples: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples), encoding="utf-8")
