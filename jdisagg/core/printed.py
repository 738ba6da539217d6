"""`Config` -> TOML file and command line that `jdisagg.core.settings` reads back. Secrets are in neither."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from jdisagg.core.config import Config, LocalPrefill
from jdisagg.core.flags import BY_NAME, FLAGS, SECTIONS, Flag, applies


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load_config` reads back to an equal one; secrets, and what is not set, are comments."""
    lines = [f"role = {json.dumps(config.role)}"]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        printed = _printed(config, section)
        for name, value in printed.items():
            lines.append(f"# {name} is set" if BY_NAME[name].syntax == "secret" else f"{name} = {_toml(value)}")
        lines += [f"# {flag.name} is not set" for flag in _flags(section) if flag.name not in printed]
    return "\n".join(lines) + "\n"


def to_flags(config: Config) -> list[str]:
    """Flags that make a child process load the same configuration, as far as it means something to its role. Secrets are left
    out: pass them in its environment."""
    defaults = Config()
    argv = ["--role", config.role]
    for section in SECTIONS:
        usual = _printed(defaults, section)
        for name, value in _printed(config, section).items():
            flag = BY_NAME[name]
            if flag.syntax == "secret" or usual.get(name) == value or not applies(flag, config.role):
                continue
            if isinstance(value, bool):
                argv.append(flag.option if value else "--no-" + flag.option[2:])
            else:
                text = ",".join(value) if isinstance(value, list) else str(value)
                argv.append(f"{flag.option}={text}")  # it may begin with a dash
    return argv


def _toml(value: Any) -> str:
    """As JSON, but for escapes: JSON has two halves of what takes more than 16 bits."""
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))


def _flags(section: str) -> list[Flag]:
    """Its keys."""
    return [flag for flag in FLAGS if flag.section == section and flag.name != "print_config"]


def _printed(config: Config, section: str) -> dict[str, Any]:
    """Set fields of one section as TOML values."""
    part = getattr(config, section)
    found: dict[str, Any] = {}
    for flag in _flags(section):
        value = getattr(part, flag.name)
        if value is LocalPrefill.BELOW_TOKENS:
            found[flag.name] = f"{value.value}={part.local_prefill_below_tokens}"
        elif isinstance(value, Enum):
            found[flag.name] = value.value
        elif value is not None:
            found[flag.name] = list(value) if isinstance(value, tuple) else value
    if "num_pages" in found or "kv_cache_bytes" in found:
        found.pop("device_memory_utilization", None)
    return found
