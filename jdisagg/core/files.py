"""Why a file could not be read or locked, and what to do about it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

from jdisagg.core.errors import ConfigError

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


def lock(file: IO[Any], name: str, *, taken: str, choose: str) -> None:
    """Have it, which messages call `name`, for this process alone until it is closed. Raises ConfigError: another process has
    it, as `taken` says, or its file system has no locks (Lustre without -o flock, NFS without lockd): what to `choose`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{name}: another process {taken}") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be locked: {error.strerror}; {choose} on a file system with locks") from error
