"""What two engines have to have in common: the beginning of more than one answer, and prompts that both have computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from bench_kit.client import Client, TimedStream
from gpu_kit.batch_section import _agree, _text
from gpu_kit.findings import Findings
from gpu_kit.questions import Question, ask

from jdisagg.models.resolve import resolve_model
from jdisagg.text.tokenizer import Tokenizer

COUNT = 16


@pytest.mark.parametrize(
    ("same", "same_first", "wanted"),
    [(16, 16, (True, True)), (2, 16, (True, True)), (1, 16, (True, False)), (0, 16, (True, False)), (8, 8, (False, True))],
)
def test_answers_that_part_behind_their_first_token_were_decoded_wrongly(
    tmp_path: Path, same: int, same_first: int, wanted: tuple[bool, bool]
) -> None:
    demo = resolve_model("demo")
    theirs = [[300 + 31 * number + at for at in range(8)] for number in range(COUNT)]
    texts = [_text(Tokenizer.from_directory(demo), ids) for ids in theirs]
    assert all(len(text) >= 8 for text in texts)
    begun = [text if number < same else f"{text[0]}~" if number < same_first else "~" for number, text in enumerate(texts)]
    _agree(demo, begun, theirs, Findings(tmp_path / "found.json"))
    checks = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert tuple(check["holds"] for check in checks) == wanted


def test_questions_are_asked_with_the_salt_that_keeps_them_from_finding_their_own_kv() -> None:
    salts: list[str] = []

    class Noting:
        def run(self, *_: Any, cache_salt: str, **__: Any) -> TimedStream:
            salts.append(cache_salt)
            return TimedStream(request_id="", sent_s=0.0)

    for salt in ("again", ""):
        ask(cast(Client, Noting()), [Question(prompt=(1,), max_tokens=1, temperature=0.0, seed=1)], 1, cache_salt=salt)
    assert salts == ["again", ""]
