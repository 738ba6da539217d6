"""The directory of compiled programs, as jax is to find it: it exists, can be written, and holds no entry that was cut short.

jax writes an entry in one call, and never again one that is there. What a full disk or a kill leaves of one would be in the
way for ever: every start would read it, warn of it and compile. Such a rest is whole blocks long, so few entries are read here.
"""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path

from jdisagg.core.errors import ConfigError
from jdisagg.core.values import expand_home

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096  # of memory and disks; larger ones are multiples
_ENTRIES = "*-cache"
_ZLIB = b"\x78"  # how its streams begin; where jax has zstandard, whose do not, only empty entries are known as broken


def usable_cache_dir(chosen: str | None) -> Path:
    """The directory, created; without a choice the user's cache directory, or one beside us when that is not writable."""
    candidates = [chosen] if chosen else ["~/.cache/jdisagg/xla", ".jdisagg-cache/xla"]
    problem: OSError | ConfigError | None = None
    for candidate in candidates:
        try:
            path = expand_home(candidate, "--compilation-cache-dir")
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ConfigError) as error:
            problem = error
        else:
            if os.access(path, os.W_OK):
                return path.absolute()
    raise ConfigError(
        f"--compilation-cache-dir: {candidates[-1]} is not writable ({problem or 'permission denied'}); "
        "name another directory, or 'off'"
    )


def drop_broken_entries(directory: Path) -> None:
    """Remove entries that were cut short; each is compiled once more, and kept. One that another process is writing just now
    may go with them."""
    for entry in directory.glob(_ENTRIES):
        try:
            if entry.stat().st_size % BLOCK_BYTES or _is_whole(entry.read_bytes()):
                continue
            entry.unlink()
        except FileNotFoundError:
            log.debug("%s: another process that starts has removed it", entry)
        except OSError as error:
            log.warning("%s may be broken, and stays: %s", entry, error.strerror)
        else:
            log.info("removed %s: it was cut short, by a full disk or a kill, and is compiled again", entry)


def _is_whole(entry: bytes) -> bool:
    if not entry.startswith(_ZLIB):
        return bool(entry)
    reader = zlib.decompressobj()
    try:
        reader.decompress(entry)
    except zlib.error:
        return False
    return reader.eof
