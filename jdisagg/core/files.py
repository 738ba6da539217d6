"""Why a file could not be read, and what to do about it: the end of an error's line."""

from __future__ import annotations

import os
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/"


def why(file: Path, error: Exception) -> str:
    """What `error` says, unless git never fetched the content, which readers call a broken header, or no JSON, or we may not
    read it: safetensors says then that there is no such file."""
    try:
        with file.open("rb") as start:
            is_pointer = start.read(len(_POINTER)) == _POINTER
    except PermissionError as denied:
        return no_access(denied)
    except OSError:
        is_pointer = False
    return (
        "it is git's note of a file that was not fetched; run git lfs pull" if is_pointer else f"{error}; copy the file again"
    )


def no_access(error: PermissionError) -> str:
    """What to do about a file or directory that belongs to somebody else."""
    return f"{error.strerror}; let user {os.geteuid()} read it (chmod -R a+rX, or the fsGroup of a volume)"
