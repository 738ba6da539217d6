"""Command line and TOML file -> `Config`: flag over file over default. No jax here: `--help` is instant.

    config = load_config(["--role", "decode", "--page-size", "32"])

A file has a top-level `role` and the sections of `jdisagg.core.flags` (or no sections at all). An unknown flag or key is a
ConfigError that names it, where it stands, and the nearest right one. `jdisagg.core.printed` is the way back.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from jdisagg.core.config import Config, LocalPrefill
from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import BY_NAME, FLAGS, ROLES, SECTIONS, Flag, check_flags, remark_on_file
from jdisagg.core.foreign_flags import advice
from jdisagg.core.values import check_keys, fail, read_value

log = logging.getLogger(__name__)

API_KEY_VARIABLE, CLIENT_API_KEY_VARIABLE = "JDISAGG_API_KEY", "JDISAGG_CLIENT_API_KEY"
_KEY_VARIABLES = {"api_key": API_KEY_VARIABLE, "client_api_key": CLIENT_API_KEY_VARIABLE}
SECTION_TYPES: dict[str, type] = {name: hint for name, hint in get_type_hints(Config).items() if name in SECTIONS}
_HINTS = {flag.name: get_type_hints(SECTION_TYPES[flag.section])[flag.name] for flag in FLAGS}
_POOL_SIZES = ("num_pages", "kv_cache_bytes", "device_memory_utilization")  # three ways to say one thing
Values = dict[str, Any]  # field name -> typed value; only what was given


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every flag, for `--help` and for `load_config`. Values stay text; absent flags are absent."""
    parser = Parser(
        prog="python -m jdisagg.serve",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Serve a model with jdisagg.",
        epilog="--version, alone, tells the version.",
    )
    parser.add_argument("--role", metavar="ROLE", help=f"{', '.join(ROLES)} (default {Config().role})")
    parser.add_argument("--config", metavar="FILE.toml", help="read settings from a file; flags win over it")
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for flag in FLAGS:
        options = [flag.option, *("--" + alias.replace("_", "-") for alias in flag.aliases)]
        default = _default(flag)
        choices = flag.choices or _members(_HINTS[flag.name])
        listed = f" ({', '.join(choices)})" if choices and flag.name != "local_prefill" else ""
        text = flag.help.replace("%", "%%") + listed + _shown(flag, default)
        if _HINTS[flag.name] is bool:
            action = "store_true" if flag.name == "print_config" else argparse.BooleanOptionalAction
            groups[flag.section].add_argument(*options, dest=flag.name, action=action, help=text)
        else:
            groups[flag.section].add_argument(*options, dest=flag.name, metavar="V", help=text)
    return parser


def load_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """The effective configuration. Raises ConfigError; exits only for `--help`. Logs which settings say nothing to the role."""
    known, unknown = build_parser().parse_known_args(list(argv))
    if unknown:
        _unknown_flag(unknown[0])
    given = vars(known)
    path = given.pop("config", None)
    flag_values: Values = _read_role(given.pop("role"), "--role") if "role" in given else {}
    file_values = _read_file(Path(path), flag_values.get("role")) if path is not None else {}
    role = (file_values | flag_values).get("role", Config().role)
    for name, raw in given.items():
        flag_values |= _read(BY_NAME[name].of(role), raw, "--" + name.replace("_", "-"), is_text=True)
    values: Values = _read_keys(environ)
    if any(name in flag_values for name in _POOL_SIZES):
        file_values = {name: value for name, value in file_values.items() if name not in _POOL_SIZES}
    values |= file_values | flag_values
    set_in_file = [name for name, value in file_values.items() if name in _HINTS and value != _default(BY_NAME[name])]
    for remark in (check_flags(given, role), remark_on_file(path, set_in_file, role)):
        if remark is not None:
            log.warning(remark)
    _check_together(values)
    return _build(values)


def _read_file(path: Path, role: str | None) -> Values:
    """Typed values of a TOML file, by field name, read for `role` or the file's own. Raises ConfigError naming file, section
    and key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOMLDecodeError for a number of 5000 digits, nor for deep nesting
        raise ConfigError(f"--config: {path} is not TOML: {error}") from error
    values: Values = _read_role(table.pop("role"), f"{path} role") if "role" in table else {}
    role = role or values.get("role", Config().role)
    for key, raw in table.items():
        if key in SECTIONS and isinstance(raw, dict):
            for inner, value in raw.items():
                flag = BY_NAME.get(inner)
                if flag is None or flag.section != key:
                    _unknown_key(path, key, inner)
                values |= _once(values, flag, _read(flag.of(role), value, f"{path} [{key}] {inner}", is_text=False), path)
        elif key in BY_NAME and not isinstance(raw, dict):
            values |= _once(values, BY_NAME[key], _read(BY_NAME[key].of(role), raw, f"{path} {key}", is_text=False), path)
        elif key in SECTIONS:
            fail(f"{path} {key}", raw, f"the section [{key}]")
        elif isinstance(raw, dict) and (key in ROLES or key in BY_NAME):
            _no_section(path, key)
        else:
            _unknown_key(path, None, key)
    return values


def _read_keys(environ: Mapping[str, str]) -> Values:
    """API keys of the environment, where a secret that was made with `echo` ends in a newline."""
    values = {name: environ[variable].strip() for name, variable in _KEY_VARIABLES.items() if variable in environ}
    for name, key in values.items():
        if not key:
            whom = "that anybody may use" if name == "api_key" else "without such a key"
            what = f"unset it for a server {whom}, or set it to the key"
            raise ConfigError(f"{_KEY_VARIABLES[name]} is set and empty: {what}")
    return values


def _read_role(raw: object, where: str) -> Values:
    """The setting that stands above the sections."""
    return {"role": raw} if raw in ROLES else fail(where, raw, "one of " + ", ".join(ROLES))


def _read(flag: Flag, raw: object, where: str, *, is_text: bool) -> Values:
    """Typed value(s) of one setting."""
    if flag.name == "local_prefill":
        return _read_local_prefill(raw, where)
    return {flag.name: read_value(flag, _HINTS[flag.name], raw, where, is_text=is_text)}


def _read_local_prefill(raw: object, where: str) -> Values:
    """One of the modes; `below-tokens` comes with its number, which is a field of its own."""
    mode, equals, count = raw.partition("=") if isinstance(raw, str) else ("", "", "")
    if mode == LocalPrefill.BELOW_TOKENS.value:
        if not count.isdecimal() or len(count) > 9:
            fail(where, raw, "below-tokens=N with a whole number N")
        return {"local_prefill": LocalPrefill.BELOW_TOKENS, "local_prefill_below_tokens": int(count)}
    if equals or mode not in _members(LocalPrefill):
        fail(where, raw, "one of on-failure, never, below-tokens=N")
    return {"local_prefill": LocalPrefill(mode)}


def _default(flag: Flag) -> Any:
    return getattr(SECTION_TYPES[flag.section](), flag.name)


def _once(values: Values, flag: Flag, new: Values, path: Path) -> Values:
    if flag.name in values:
        raise ConfigError(f"{path}: {flag.name} is set twice (an alias, or once outside its section)")
    return new


def _build(values: Values) -> Config:
    parts: dict[str, Any] = {}
    for section, kind in SECTION_TYPES.items():
        parts[section] = kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})
    return Config(role=values.get("role", Config().role), **parts)


def _check_together(values: Values) -> None:
    """Refuse settings that contradict each other."""
    sizes = [name for name in _POOL_SIZES if name in values]
    if len(sizes) > 1:
        raise ConfigError(f"{BY_NAME[sizes[1]].option}: got it beside {BY_NAME[sizes[0]].option}; keep one of them")
    config = _build(values)
    if 0 < config.server.port == config.server.grpc_port:
        fail("--grpc-port", config.server.grpc_port, "another than --port, or 0 for a free one")
    check_keys(config.server.api_key, config.server.client_api_key)
    step, slots = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if step < slots and config.role != "prefill":  # which decodes nothing
        fail(
            "--max-num-batched-tokens", step, f"at least --max-num-seqs = {slots}: each running sequence takes a token per step"
        )
    if config.cache.enable_kv_events and not config.cache.enable_prefix_caching:
        fail("--enable-kv-events", True, "prefix caching: drop --no-enable-prefix-caching, or there is nothing to publish")
    beat_s = config.transfer.heartbeat_s
    for option, limit_s in (("--dead-after-s", config.transfer.dead_after_s), ("--lease-s", config.transfer.lease_s)):
        if limit_s < 2 * beat_s:  # whoever is alive would be given up between two of them
            fail(option, limit_s, f"at least twice --heartbeat-s = {beat_s:g}")
    can_prefill = config.transfer.prefill or config.server.router or config.transfer.local_prefill is not LocalPrefill.NEVER
    if config.role == "decode" and not can_prefill:
        fail("--local-prefill", "never", "a way to prefill: give --prefill or --router, or allow local prefill")
    if config.role == "local" and not config.local.num_prefill and config.transfer.local_prefill is LocalPrefill.NEVER:
        fail("--num-prefill", 0, "at least 1 with --local-prefill never: nobody could compute a prompt")
    if config.scheduler.schedule_log and not os.access(Path(config.scheduler.schedule_log).parent, os.W_OK):
        fail("--schedule-log", config.scheduler.schedule_log, "a file in a directory that exists and is writable")


def _unknown_flag(text: str) -> NoReturn:
    name = text.split("=", maxsplit=1)[0]
    options = [option for action in build_parser()._actions for option in action.option_strings]
    if not text.startswith("-"):
        raise ConfigError(f"{text}: unexpected argument; settings are flags like --model {text}")
    told = f"; {known}" if (known := advice(name)) else _nearest(name, options)
    raise ConfigError(f"{name}: unknown flag{told}")


def _unknown_key(path: Path, section: str | None, key: str) -> NoReturn:
    place = f"{path} [{section}] {key}" if section else f"{path} {key}"
    flag = BY_NAME.get(key)
    if flag is not None:
        raise ConfigError(f"{place}: this key belongs to [{flag.section}]; move it there")
    candidates = [*BY_NAME, *([] if section else ["role", *SECTIONS])]
    told = f"; {known}" if (known := advice("--" + key.replace("_", "-"))) else _nearest(key, candidates)
    raise ConfigError(f"{place}: unknown key{told}")


def _no_section(path: Path, key: str) -> NoReturn:
    of_role = f'a file is of one role, as in role = "{key}" above all sections'
    told = of_role if key in ROLES else f"there are {', '.join(SECTIONS)}"
    raise ConfigError(f"{path} [{key}]: no such section; {told}")


def _nearest(name: str, candidates: list[str]) -> str:
    spelt = {candidate.lstrip("-"): candidate for candidate in candidates}  # two dashes alike are no likeness
    close = difflib.get_close_matches(name.lstrip("-"), spelt, n=1, cutoff=0.6)
    return f"; did you mean {spelt[close[0]]}?" if close else "; see --help for the list"


def _members(hint: Any) -> tuple[str, ...]:
    return tuple(member.value for member in hint) if isinstance(hint, type) and issubclass(hint, Enum) else ()


def _shown(flag: Flag, default: object) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "" if flag.name == "print_config" else f" (default {'on' if default else 'off'})"
    if isinstance(default, Enum):
        default = default.value
    elif flag.syntax == "bytes" and isinstance(default, int):
        default = f"{default // 2**20}MiB"
    return f" (default {default})".replace("%", "%%")
