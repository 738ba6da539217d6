"""The same probes answered by transformers on the CPU, in float32, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eval_tasks.tasks import Answers, Probe, until_stop


def reference_answers(directory: Path, probes: list[Probe]) -> Answers:
    """Answers in the form of the batch's."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        return {
            probe.name: _generate(model, tokenizer, probe) if probe.max_tokens else _score(model, probe) for probe in probes
        }


def _score(model: PreTrainedModel, probe: Probe) -> dict[str, object]:
    ids = torch.tensor([probe.token_ids])
    logprobs = model(ids).logits[0, :-1].log_softmax(dim=-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return {"text": "", "logprobs": {"token_logprobs": [None, *chosen]}}


def _generate(model: Any, tokenizer: PreTrainedTokenizerBase, probe: Probe) -> dict[str, object]:
    """Greedy; what follows a stop string is cut off, as a server does."""
    ids = torch.tensor([probe.token_ids])
    options = {"do_sample": False, "temperature": None, "top_p": None, "max_new_tokens": probe.max_tokens}
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    text = tokenizer.decode(generated[0, len(probe.token_ids) :], skip_special_tokens=True)
    return {"text": until_stop(str(text), probe.stop), "logprobs": None}
