"""Why a file could not be read, and what to do about it: the end of an error's line."""

from __future__ import annotations

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/"


def why(file: Path, error: Exception) -> str:
    """What `error` says, unless git never fetched the content: readers call that a broken header, or no JSON."""
    try:
        with file.open("rb") as start:
            is_pointer = start.read(len(_POINTER)) == _POINTER
    except OSError:
        is_pointer = False
    return (
        "it is git's note of a file that was not fetched; run git lfs pull" if is_pointer else f"{error}; copy the file again"
    )
