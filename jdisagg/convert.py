"""`python -m jdisagg.convert --model DIR --output DIR [--dtype T]`: a Hugging Face directory becomes an Orbax one.

Everything is written to a temporary sibling, config.json last, and renamed at the end: a killed conversion leaves no
directory that loads. Conversion holds the whole model in host memory once; serving never does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from types import FrameType

import jax

from jdisagg.core.errors import ConfigError
from jdisagg.models.form import DTYPES
from jdisagg.models.orbax_source import save_orbax
from jdisagg.models.resolve import read_config, resolve_model
from jdisagg.models.safetensors_files import has_safetensors, stored_dtype
from jdisagg.models.safetensors_source import load_safetensors
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from jdisagg.text.tokenizer import ADDITIONAL_TEMPLATES

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
)
LOOK_S, SETTLED_LOOKS, MOST_LOOKS = 0.05, 10, 100


def convert(source: Path, output: Path, *, dtype: str | None) -> None:
    """Write `source` to `output` as an Orbax checkpoint; `dtype` None keeps that of the weights (`stored_dtype`).

    Raises ConfigError when `output` exists or cannot be written, or `source` cannot be read; then nothing is left behind.
    """
    try:
        _convert(source, output, dtype)
    except OSError as error:  # of files that are written: those of a model are read elsewhere, and named
        raise _unwritable(output, error.strerror or str(error)) from error


def _convert(source: Path, output: Path, dtype: str | None) -> None:
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output: {output} exists; give a new name or remove it")
    if not output.parent.is_dir():
        raise ConfigError(f"--output: {output.parent} is not a directory; create it first")
    config = read_config(source)
    spec = ModelSpec.from_config(config)
    if not has_safetensors(source):
        message = f"--model: {source} holds no safetensors weights; give a Hugging Face directory that does"
        raise ConfigError(message)
    dtype = dtype or stored_dtype(source)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        params = load_safetensors(source, spec, make_mesh(jax.devices("cpu"), 1), dtype)
        try:
            save_orbax(partial, spec, params)
        except ValueError as error:  # tensorstore's name for a disk that takes no more
            raise _unwritable(output, str(error).partition("\n")[0]) from error
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        if (source / ADDITIONAL_TEMPLATES).is_dir():
            shutil.copytree(source / ADDITIONAL_TEMPLATES, partial / ADDITIONAL_TEMPLATES)
        written = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users
        _rename_new(partial, output)
    except BaseException:
        _remove(partial)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, with one line on stderr (1: the model cannot be fetched now, 2: a bad flag or
    checkpoint)."""
    parser = argparse.ArgumentParser(
        prog="python -m jdisagg.convert", description="Convert a Hugging Face model directory to Orbax."
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory or Hub id with safetensors weights")
    parser.add_argument("--output", required=True, type=Path, help="directory to create")
    parser.add_argument("--dtype", choices=DTYPES, help="element type to store (default: that of the weights)")
    args = parser.parse_args(argv)
    try:
        source = resolve_model(args.model)
        with _tidy_when_told():
            convert(source, args.output, dtype=args.dtype)
    except ConfigError as error:
        print(f"jdisagg.convert: {error.message}", file=sys.stderr)
        return error.exit_status
    print(json.dumps({"event": "converted", "output": str(args.output.resolve())}))
    return 0


@contextmanager
def _tidy_when_told() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does, with status 143: what was written so far is removed. A second one is not
    heard, it would leave that there."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(directory: Path) -> None:
    """With what threads of a save that failed still write: until it is gone at SETTLED_LOOKS in a row, or after MOST_LOOKS.
    Looks are counted, not seconds: a process that stands still gives those threads no turn, either."""
    num_gone = 0
    for _ in range(MOST_LOOKS):
        if directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
            num_gone = 0
        elif (num_gone := num_gone + 1) == SETTLED_LOOKS:
            return
        sleep(LOOK_S)


def _unwritable(output: Path, why: str) -> ConfigError:
    return ConfigError(f"--output: {output} cannot be written: {why}; make room there or choose another --output")


def _rename_new(partial: Path, output: Path) -> None:
    """Rename; another process may have made `output` meanwhile (an existing directory with files makes rename fail)."""
    try:
        os.rename(partial, output)
    except OSError as error:
        raise ConfigError(f"--output: cannot create {output}: {error.strerror}") from error


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # an accelerator is of no use here and may be busy serving
    sys.exit(main())
