"""Greedy answers judged by transformers in float32: every token must be its first choice, or as good as."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from chaos_kit.catalogue import Entry


def disagreements(model: Path, answers: dict[int, tuple[Entry, list[int]]], near_tie: float) -> list[str]:
    """Where an answer has a token that is worse than the best one by more than `near_tie`; teacher-forced."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for number, (entry, tokens) in answers.items():
            ids = torch.tensor([[*entry.prompt, *tokens]])
            logits = network(ids).logits[0, len(entry.prompt) - 1 : -1]
            gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            worst = int(gaps.argmax())
            if float(gaps[worst]) > near_tie:
                found.append(f"entry {number}, token {worst}: {float(gaps[worst]):.4f} below the best logit")
    return found
