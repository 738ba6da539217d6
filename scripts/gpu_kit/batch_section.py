"""Section `batch`: tokens per second of jdisagg.batch beside transformers' continuous batching, on the same random weights."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from bench_kit.model import Prompts

from gpu_kit.ending import with_our_pid
from gpu_kit.findings import Findings
from gpu_kit.setting import Setting
from gpu_kit.shapes import batch_shape
from gpu_kit.targets import BATCHED
from jdisagg.batch.journal import Journal
from jdisagg.batch.local import open_local
from jdisagg.batch.runner import Batch, run_batch
from jdisagg.batch.sender import Sender, served_model
from jdisagg.core.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from jdisagg.text.tokenizer import Tokenizer

THEIR_MODULES = ("torch", "transformers", "accelerate")
THEIR_SHARE = 0.5  # of the section's time
PATIENCE_S = 30.0
OK = 200
BEGINNING = 8  # characters of an answer: behind its first token, which prompts give alone
LEAST_GO_ON = 1 / 8  # of the answers: where decoding is wrong none does


def run(setting: Setting, findings: Findings) -> None:
    """See Section. Both get the same prompts at once and answer greedily to the last token."""
    scale = setting.scale
    longest = scale.batch.prompt + scale.batch.output
    directory = batch_shape(small=setting.small).write(setting.scratch / "batch", longest)
    prompts = Prompts(31)
    asked = [prompts.next(scale.batch.prompt) for _ in range(scale.batch.requests)]
    findings.fact(requests=len(asked), prompt_tokens=scale.batch.prompt, output_tokens=scale.batch.output)
    theirs = _theirs(setting, directory, asked, findings)
    answers: dict[str, Any] = {}
    findings.attempt("jdisagg.batch", lambda: answers.update(asyncio.run(_ours(setting, directory, asked, theirs is None))))
    if not answers:
        findings.target(BATCHED, None, "jdisagg.batch failed")
        return
    findings.fact(jdisagg_tokens_per_s=answers["tokens_per_s"])
    findings.check("jdisagg.batch answered every line", answers["num_ok"] == len(asked), f"{answers['num_ok']} of {len(asked)}")
    times = None if theirs is None else answers["tokens_per_s"] / theirs["tokens_per_s"]
    if theirs is not None:
        _agree(directory, answers["texts"], theirs["answers"], findings)
    why = "transformers' continuous batching did not run"
    findings.target(BATCHED, None if setting.small else times, "no accelerator" if theirs else why)


def _theirs(setting: Setting, directory: Path, asked: list[list[int]], findings: Findings) -> dict[str, Any] | None:
    """What they did; their process also makes the weights, in `directory`. None = left out, by name."""
    part = "transformers' continuous batching"
    if missing := [name for name in THEIR_MODULES[:2] if importlib.util.find_spec(name) is None]:
        findings.left_out(part, f"not installed: {', '.join(missing)}")
        return None
    question = setting.scratch / "batch_question.json"
    question.write_text(json.dumps({"prompts": asked, "max_tokens": setting.scale.batch.output}))
    command = [sys.executable, "-m", "gpu_kit.transformers_batch", str(directory), str(question)]
    limit_s = THEIR_SHARE * setting.clock.left_s()
    with setting.log("transformers").open("wb") as log:
        try:
            done = subprocess.run(
                command,
                env=with_our_pid(os.environ),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            findings.left_out(part, f"not done after {limit_s:.0f} s")
            return None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        findings.left_out(part, f"exit status {done.returncode}; see {setting.log('transformers').name}")
        return None
    found = json.loads(lines[-1])
    findings.fact(
        transformers_tokens_per_s=found["tokens_per_s"],
        transformers_timed_by=found["timed_by"],
        transformers_warm_up_s=found["warm_up_s"],
    )
    return found


def _agree(directory: Path, ours: list[str], theirs: list[list[int]], findings: Findings) -> None:
    """Greedy answers part sooner or later where floats are rounded otherwise; a fault would part them at once."""
    tokenizer = Tokenizer.from_directory(directory)
    texts = [_text(tokenizer, ids) for ids in theirs]
    pairs = list(zip(ours, texts, strict=False))
    alike = sum(a[:1] == b[:1] for a, b in pairs)
    go_on = sum(a[:BEGINNING] == b[:BEGINNING] for a, b in pairs)
    findings.fact(answers_equal=sum(a == b for a, b in pairs))
    findings.check("both serve the same weights", alike > len(pairs) / 2, f"{alike} of {len(pairs)} answers begin alike")
    ours_go_on = f"{go_on} of {len(pairs)} answers are the same for {BEGINNING} characters"
    findings.check("both decode alike", go_on >= LEAST_GO_ON * len(pairs), ours_go_on)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()


async def _ours(setting: Setting, directory: Path, asked: list[list[int]], dummy: bool) -> dict[str, Any]:
    """The same file of requests through the same code as `python -m jdisagg.batch`, timed once the engine is ready."""
    scale = setting.scale
    source, output = setting.scratch / "batch.jsonl", setting.scratch / "batch_output.jsonl"
    lines = [{"token_ids": ids, "max_tokens": scale.batch.output, "temperature": 0, "ignore_eos": True} for ids in asked]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = Batch(input=source, output=output, max_concurrency=len(asked))
    timeout, config = httpx.Timeout(max(5.0, setting.clock.left_s()), connect=10.0), _config(setting, directory, dummy)
    async with open_local(config, timeout) as client:
        sender = Sender(client, patience_s=PATIENCE_S)
        served = await served_model(sender)
        began_s = time.monotonic()
        with Journal(batch.output, batch.header(served.name, served.fingerprint)) as journal:
            await run_batch(batch, journal, sender, lambda *_: None)
        seconds = time.monotonic() - began_s
    responses = [json.loads(line)["response"] or {} for line in output.read_text().splitlines()]
    bodies = [response.get("body", {}) for response in responses if response.get("status_code") == OK]
    counts = [body["usage"]["completion_tokens"] for body in bodies]
    return {
        "tokens_per_s": sum(counts) / seconds,
        "num_ok": sum(count == scale.batch.output for count in counts),
        "texts": [body["choices"][0]["text"] for body in bodies],
    }


def _config(setting: Setting, directory: Path, dummy: bool) -> Config:
    scale, longest = setting.scale, setting.scale.batch.prompt + setting.scale.batch.output
    pages = (len_pages := -(-longest // 16)) * scale.batch.requests + len_pages
    return Config(
        role="unified",
        model=ModelConfig(
            model=str(directory),
            load_format="dummy" if dummy else "safetensors",
            dtype="float32" if setting.small else "bfloat16",
            max_model_len=longest,
        ),
        cache=CacheConfig(num_pages=pages),
        scheduler=SchedulerConfig(
            max_num_seqs=min(scale.batch.requests, 128), max_num_batched_tokens=64 if setting.small else 2048
        ),
    )
