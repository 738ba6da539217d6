"""In which of the formats that are read a directory holds its weights. No jax here: a directory without any is seen at once."""

from __future__ import annotations

from pathlib import Path

from jdisagg.core.errors import ConfigError
from jdisagg.models.resolve import check_whole, has_orbax
from jdisagg.models.safetensors_files import has_safetensors

_OTHERS = ("*.bin", "*.gguf", "*.pth", "*.pt", "consolidated*.safetensors")


def choose_format(wanted: str, directory: Path) -> str:
    """The value of `--load-format` without auto. Raises ConfigError when `directory` holds no weights of that format, and
    names those that it holds."""
    present = {"safetensors": has_safetensors(directory), "orbax": has_orbax(directory), "dummy": True}
    if wanted == "auto":
        wanted = "orbax" if present["orbax"] and not present["safetensors"] else "safetensors"
    if not present[wanted]:
        check_whole(directory)
        others = sorted(file.name for pattern in _OTHERS for file in directory.glob(pattern))
        saved = f" but {others[0]}; save the model with save_pretrained of transformers, or" if others else ";"
        raise ConfigError(
            f"--load-format: {directory} holds no {wanted} weights{saved} give another --model, or --load-format dummy"
        )
    return wanted
