"""What makes two batches one: an answer of the one may stand for that of the other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jdisagg.batch.lines import Call
from jdisagg.batch.runner import Batch
from jdisagg.core.settings import load_config


def test_a_batch_of_another_input_seed_or_setting_that_answers_depend_on_is_another(tmp_path: Path) -> None:
    """The model's own name too, where it is served under one name; how many requests are under way changes none."""
    settings = [["--model", "x"], ["--load-format", "dummy"], ["--dtype", "float32"], ["--kv-cache-dtype", "float32"]]
    settings += [["--max-model-len", "64"], ["--numerics", "exact"], ["--served-model-name", "x"], []]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n')
    (other := tmp_path / "other.jsonl").write_text('{"prompt": "y"}\n')

    def batch(flags: list[str], source: Path = source, **more: int) -> Batch:
        config = load_config(["--role", "unified", "--served-model-name", "demo", *flags])
        return Batch(input=source, output=output, config=config, **more)

    batches = [*map(batch, settings), batch([], seed=1), batch([], other)]
    batches.append(Batch(input=source, output=output))
    assert len({batch.id for batch in batches}) == len(batches)
    assert len({json.dumps(batch.header("demo")) for batch in batches}) == len(batches)
    assert batch([], max_concurrency=2).id == batch([]).id
    call = Call(3, "a", "/v1/completions", {"prompt": "x"})
    calls = [replace(call, number=4), replace(call, custom_id="b"), replace(call, url="/"), replace(call, body={"prompt": "y"})]
    asked = [one.request_id(call) for one in batches if one.input == source] + [batch([]).request_id(one) for one in calls]
    assert len(set(asked)) == len(batches) - 1 + len(calls)
    assert batch([], other).request_id(call) == batch([]).request_id(call), "of another input it may be the same request"
