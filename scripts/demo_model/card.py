"""The demo's model card."""

from __future__ import annotations

import platform
from pathlib import Path

import jax
from eval_tasks.tasks import STRIDE, WINDOW

from demo_model.evaluate import Scores
from demo_model.net import Shape
from demo_model.state import TrainState

CARD = """---
license: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---
# jdisagg demo

A {parameters:.1f} M parameter Llama-style decoder that continues Python source. It exists so that jdisagg can be installed,
tested and shown without a download; it is no useful assistant.

- **Shape**: {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads and \
{shape.num_key_value_heads} key-value heads of {shape.head_dim}, mlp {shape.intermediate_size}, tied embedding,
  byte-level BPE of {shape.vocab_size} tokens, context {shape.max_position_embeddings} (trained on windows of at most 1,024).
- **Data**: the standard library of CPython {python}, without tests; every 20th module (sorted by path) is held out of
  training and of the tokenizer; plus short conversations made from its documented functions, for the chat template.
- **Licence**: trained on and distributed under the Python Software Foundation Licence, version 2.
- **Training**: {state.step} steps, {tokens:.1f} M tokens, {minutes:.0f} minutes on {backend}; Muon for the matrices, Adam for
  embedding and norms, linear decay to zero. `scripts/train_demo_model.py` repeats it.

## Held-out modules

Bits per byte, {scores.files} files, {scores.num_bytes} bytes, {scores.num_tokens} tokens. Context and compressors start
afresh at every file; windows of {window} tokens advance by {stride}. Weights as shipped (bfloat16), arithmetic in float32.

The tables of `encodings` much resemble one another, so the modules outside it stand in a column of their own
({prose.files} files, {prose.num_bytes} bytes).

| model | bits per byte | without `encodings` |
| --- | --- | --- |
| this model | {scores.bits_per_byte:.4f} | {prose.bits_per_byte:.4f} |
| xz -9 | {scores.xz:.4f} | {prose.xz:.4f} |
| gzip -9 | {scores.gzip:.4f} | {prose.gzip:.4f} |

Loss: {loss:.4f} nats per held-out token. The excerpts of held-out modules in `configs/eval/perplexity.jsonl`, whose short
contexts make them harder: {task.bits_per_byte:.4f} bits per byte (xz {task.xz:.4f}).
"""


def write_card(path: Path, state: TrainState, shape: Shape, *, scores: Scores, prose: Scores, task: Scores) -> None:
    """Write README.md from what was measured: all held-out modules, those outside `encodings`, the task's excerpts."""
    text = CARD.format(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)) / 1e6,
        shape=shape,
        python=".".join(platform.python_version_tuple()[:2]),
        state=state,
        tokens=state.tokens / 1e6,
        minutes=state.elapsed_s / 60,
        backend={"cpu": "two CPU cores"}.get(jax.default_backend(), jax.default_backend()),
        scores=scores,
        prose=prose,
        task=task,
        window=WINDOW,
        stride=STRIDE,
        loss=scores.bits_per_byte * 0.6931471805599453 * scores.num_bytes / scores.num_tokens,
    )
    path.write_text(text, encoding="utf-8")
