"""Train the demo model on the Python standard library and write it as a Hugging Face directory.

    python scripts/train_demo_model.py train --work-dir WORK --time-budget-s 3600
    python scripts/train_demo_model.py export --work-dir WORK --output jdisagg/demo
    python scripts/train_demo_model.py tasks --output configs/eval

`train` may be stopped at any time and started again: it resumes from the last checkpoint in the work folder and ends when
either the steps or the time are used up, the learning rate having decayed to zero. `export` may run beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from demo_model.card import write_card
from demo_model.corpus import chat_documents, load_corpus
from demo_model.evaluate import held_out_scores, task_texts
from demo_model.export import export_tokenizer, export_weights
from demo_model.net import Shape, init_params
from demo_model.state import TrainState, load_state, lr_factor, make_optimizer, make_step, save_state
from demo_model.tasks import write_tasks
from demo_model.tokens import Stream, encode_documents, train_tokenizer
from tokenizers import Tokenizer

CHAT_DOCUMENTS = 1500
TASK_TEXTS = Path("configs/eval/perplexity.jsonl")


def main() -> None:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train or resume")
    train.add_argument("--steps", type=int, default=4000, help="steps of the whole run")
    train.add_argument("--time-budget-s", type=float, default=3600.0, help="seconds in all, earlier sessions included")
    train.add_argument("--seq-len", type=int, default=512, help="tokens of one training window")
    train.add_argument("--tokens-per-step", type=int, default=4096)
    train.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--matmul-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    export = commands.add_parser("export", help="evaluate the last checkpoint and write the model directory")
    export.add_argument("--output", type=Path, default=Path("jdisagg/demo"))
    export.add_argument("--held-out-files", type=int, help="score only so many (default all)")
    for command in (train, export):
        command.add_argument("--work-dir", type=Path, required=True, help="checkpoints and tokenizer; not for git")
    tasks = commands.add_parser("tasks", help="write small evaluation tasks made from the held-out modules")
    tasks.add_argument("--output", type=Path, default=Path("configs/eval"))
    args = parser.parse_args()
    if args.command == "train":
        run_training(args)
    elif args.command == "export":
        run_export(args)
    else:
        write_tasks(args.output, load_corpus().held_out, count=40, seed=0)


def run_training(args: argparse.Namespace) -> None:
    """Train until steps or time are used up, with a checkpoint every few steps and at the end."""
    args.work_dir.mkdir(parents=True, exist_ok=True)
    shape, stream = Shape(), prepare_stream(args.work_dir, args.seed)
    state = last_state(args.work_dir, shape, args.seed)
    rows = args.tokens_per_step // args.seq_len
    log(f"{stream.num_tokens} tokens an epoch, {rows} x {args.seq_len} a step, {jax.default_backend()}, from step {state.step}")
    step_fn = make_step(shape, jnp.dtype(args.matmul_dtype))
    stop = StopRequest()
    began_s, earlier_s = time.monotonic(), state.elapsed_s
    for tokens, segments in stream.batches(rows=rows, seq_len=args.seq_len, start_token=state.tokens):
        progress = max(state.step / args.steps, state.elapsed_s / args.time_budget_s)
        if progress >= 1.0 or stop.asked:
            break
        factor = lr_factor(state.step, progress)
        params, optimizer, loss = step_fn(
            state.params, state.optimizer, jnp.asarray(tokens), jnp.asarray(segments), jnp.float32(factor)
        )
        nats = float(loss)
        state = dataclasses.replace(
            state,
            params=params,
            optimizer=optimizer,
            step=state.step + 1,
            tokens=state.tokens + rows * args.seq_len,
            elapsed_s=earlier_s + time.monotonic() - began_s,
        )
        if state.step % 10 == 0:
            log(f"step {state.step} loss {nats:.4f} lr {factor:.3f} progress {progress:.3f} elapsed {state.elapsed_s:.0f} s")
        if state.step % args.checkpoint_every == 0:
            save_state(args.work_dir / "state.npz", state)
    save_state(args.work_dir / "state.npz", state)
    log(f"{'stopped' if stop.asked else 'done'} at step {state.step}")


class StopRequest:
    """SIGTERM and SIGINT end the run after the current step, with a checkpoint."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


def run_export(args: argparse.Namespace) -> None:
    """Evaluate the last checkpoint (rounded to bfloat16, as shipped) on the held-out modules and write everything."""
    shape = Shape()
    tokenizer = Tokenizer.from_file(str(args.work_dir / "tokenizer.json"))
    state = last_state(args.work_dir, shape, seed=0)
    shipped = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), state.params)
    modules = load_corpus().held_out[: args.held_out_files]
    scores = held_out_scores(shipped, shape, tokenizer, modules)
    prose = [module for module in modules if not module.path.startswith("encodings/")]
    prose_scores = held_out_scores(shipped, shape, tokenizer, prose)
    task = held_out_scores(shipped, shape, tokenizer, task_texts(TASK_TEXTS))
    export_tokenizer(args.output, tokenizer, shape)
    export_weights(args.output, state.params, shape)
    write_card(args.output / "README.md", state, shape, scores=scores, prose=prose_scores, task=task)
    log(f"step {state.step}: {scores.bits_per_byte:.4f} bits per byte, gzip {scores.gzip:.4f}, xz {scores.xz:.4f}")


def prepare_stream(work_dir: Path, seed: int) -> Stream:
    """Tokenizer (trained once, then kept in the work folder) and the tokenised training documents."""
    corpus = load_corpus()
    texts = [module.text for module in corpus.train]
    chats = chat_documents(corpus.train, count=CHAT_DOCUMENTS, seed=seed)
    path = work_dir / "tokenizer.json"
    if not path.exists():
        log(f"training the tokenizer on {len(texts)} modules")
        train_tokenizer(texts, Shape().vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    documents = encode_documents(tokenizer, texts) + encode_documents(tokenizer, chats)
    size = sum(len(text.encode()) for text in texts + chats)
    stream = Stream(documents, seed)
    log(f"{len(documents)} documents, {size} bytes, {size / stream.num_tokens:.2f} bytes a token")
    return stream


def last_state(work_dir: Path, shape: Shape, seed: int) -> TrainState:
    """The last checkpoint, or fresh weights."""
    params = init_params(jax.random.key(seed), shape)
    fresh = TrainState(params, make_optimizer().init(params))
    path = work_dir / "state.npz"
    return load_state(path, fresh) if path.exists() else fresh


def log(message: str) -> None:
    """One line on stderr, at once."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
