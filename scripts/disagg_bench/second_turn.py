"""Bytes of the second turn of a chat, both directions: how much of the conversation travels again."""

from __future__ import annotations

from typing import Any

from bench_kit.client import TimedStream
from bench_kit.figures import table
from bench_kit.model import Prompts

from disagg_bench.model import BenchModel
from disagg_bench.workers import Workers

FIRST_PROMPT_TOKENS = 2000
ANSWER_TOKENS = 64
NEW_TOKENS = 100
_BYTES, _COMPUTED = "jdisagg_transfer_bytes_total", "jdisagg_prefill_tokens_total"


def measure(workers: Workers, prompts: Prompts, model: BenchModel) -> dict[str, Any]:
    """Two turns on one D, with P's and D's prefix caches on."""
    prompt = prompts.next(FIRST_PROMPT_TOKENS)
    first, answer = _turn(workers, model, prompt)
    second, _ = _turn(workers, model, [*prompt, *answer.token_ids, *prompts.next(NEW_TOKENS)])
    return {"turns": [first, second], "kv_bytes_per_token": model.kv_bytes_per_token}


def _turn(workers: Workers, model: BenchModel, prompt: list[int]) -> tuple[dict[str, Any], TimedStream]:
    before = workers.decode.counters(), workers.prefill.counters()
    stream = workers.decode.client.run(prompt, ANSWER_TOKENS)
    after = workers.decode.counters(), workers.prefill.counters()
    to_d, to_p = (new[_BYTES] - old[_BYTES] for new, old in zip(after, before, strict=True))
    turn = {
        "prompt_tokens": len(prompt),
        "computed_on_p": after[1][_COMPUTED] - before[1][_COMPUTED],
        "to_d_bytes": to_d,
        "to_p_bytes": to_p,
        "whole_bytes": len(prompt) * model.kv_bytes_per_token,
        "ttft_ms": 1e3 * stream.first_s,
    }
    return turn, stream


def lines(of: dict[str, Any]) -> list[str]:
    """The table."""
    per_token = of["kv_bytes_per_token"]
    rows = []
    for number, turn in enumerate(of["turns"], start=1):
        ways = [turn["to_d_bytes"], turn["to_p_bytes"]]
        rows.append(
            [
                str(number),
                str(turn["prompt_tokens"]),
                f"{turn['computed_on_p']:.0f}",
                *(f"{way:.0f} ({way / per_token:.0f} tokens)" for way in ways),
                f"{sum(ways) / turn['whole_bytes']:.1%}",
                f"{turn['ttft_ms']:.1f}",
            ]
        )
    return table(
        f"4. A chat: {FIRST_PROMPT_TOKENS} tokens, an answer of {ANSWER_TOKENS}, {NEW_TOKENS} more; {per_token} bytes a token",
        ("turn", "prompt", "computed on P", "bytes P to D", "bytes D to P", "of all its KV", "TTFT ms"),
        rows,
    )
