"""transformers' continuous batching in a process of its own: `python -m gpu_kit.transformers_batch DIR QUESTION.json`.

Makes a model with random weights of DIR/config.json, saves it there, then answers the prompts. The last line on stdout is
JSON: tokens per second behind a first, small batch.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpu_kit.ending import end_with_parent

WARM_PROMPTS, WARM_TOKENS = 4, 4
CPU_BLOCKS, CPU_PAGE, CPU_TOKENS = 64, 16, 64
PAGE_NAMES = ("page_size", "block_size")  # of transformers 5.23, which keeps the other one for old callers, and of 5.17
STD = 0.05  # of the weights: larger than usual, so that greedy streams vary


def main() -> int:
    """Returns the exit status."""
    end_with_parent()
    directory, asked = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = _model(torch, transformers, directory, device, dtype)
    model.save_pretrained(directory)
    prompts, max_tokens = asked["prompts"], asked["max_tokens"]
    began_s = time.monotonic()
    _generate(model, transformers, prompts[:WARM_PROMPTS], WARM_TOKENS)
    warm_up_s = time.monotonic() - began_s
    began_s = time.monotonic()
    answers = _generate(model, transformers, prompts, max_tokens)
    seconds, timed_by = span(list(answers.values()), time.monotonic() - began_s)
    ids = [list(answer.generated_tokens) for answer in answers.values()]
    num_tokens = sum(map(len, ids))
    if num_tokens != len(prompts) * max_tokens:
        print(f"{num_tokens} tokens, wanted {len(prompts) * max_tokens}", file=sys.stderr)
        return 1
    found = {"tokens_per_s": num_tokens / seconds, "timed_by": timed_by, "warm_up_s": warm_up_s, "device": device}
    found["answers"] = ids
    print(json.dumps(found), flush=True)
    return 0


def span(answers: Sequence[Any], call_s: float) -> tuple[float, str]:
    """Seconds from the first request made to the last one ended, by the stamps that transformers gives them, and which it was.

    The call around them also makes a cache, captures graphs, and destroys both, which a server does once; it counts as a whole
    where there are no stamps.
    """
    made = [getattr(answer, "created_time", 0.0) for answer in answers]
    ended = [getattr(answer, "lifespan", (0.0, 0.0))[1] for answer in answers]
    is_stamped = min((*made, *ended), default=0.0) > 0
    if is_stamped and 0 < (seconds := max(ended) - min(made)) <= call_s:
        return seconds, "requests' own stamps"
    return call_s, "the whole call, with making and destroying its cache"


def cpu_sizes(config: type) -> dict[str, int]:
    """Settings of a small cache. Its page is called by one name or another, as versions have it."""
    page = next(field.name for field in fields(config) if field.name in PAGE_NAMES)
    return {"num_blocks": CPU_BLOCKS, page: CPU_PAGE, "max_batch_tokens": CPU_TOKENS}


def _model(torch: Any, transformers: Any, directory: Path, device: str, dtype: Any) -> Any:
    """Built where it runs: initialising on the host takes a minute."""
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, STD)
    return model.eval()


def _generate(model: Any, transformers: Any, prompts: list[list[int]], max_tokens: int) -> Any:
    settings = transformers.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {}
    if model.device.type == "cpu":  # it would take most of the machine's memory for its cache
        config = importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig
        sizes["continuous_batching_config"] = config(**cpu_sizes(config))
    return model.generate_batch(prompts, generation_config=settings, progress_bar=False, **sizes)


if __name__ == "__main__":
    sys.exit(main())
