"""A batch to run: its lines in a file, and the command that sends them to a server."""

from __future__ import annotations

from pathlib import Path

LINES = [
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "one", "max_tokens": 2}}',
    '{"prompt": "two"}',
    "",
    '{"token_ids": [1, 2, 3], "seed": 77}',
    '{"prompt": "five", "token_ids": [5]}',
    "not json",
    '{"messages": [{"role": "user", "content": "seven"}], "custom_id": "g"}',
    '{"custom_id": "h", "method": "GET", "url": "/v1/completions", "body": {}}',
    '{"custom_id": "i", "method": "POST", "url": "/v1/embeddings", "body": {}}',
    '{"prompt": "ten", "max_tokens": -1}',
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def arguments(source: Path, output: Path, url: str, *more: str) -> list[str]:
    return ["--input", str(source), "--output", str(output), "--server", url, "--quiet", *more]
