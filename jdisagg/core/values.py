"""One setting's value: text of a flag or a TOML value -> the typed value of the config field, bounds checked.

Every ConfigError reads `WHERE: got VALUE, wanted WHAT`; WHERE is the flag, or file, section and key.
"""

from __future__ import annotations

import ipaddress
import math
import re
import types
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin

from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import Flag
from jdisagg.core.foreign_flags import value_advice

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_HOST = r"[^\s\[\]:,/$(){}'\"]+"  # no shell's or orchestrator's variable that was left as it is: $(POD_IP)
_ADDRESS = re.compile(rf"(\[[0-9a-fA-F:.]+\]|{_HOST}):(\d{{1,5}})")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s\[\]:,/?#@A-Z]+)(:\d{1,5})?")  # as browsers send it
_DIGITS = r"\d{1,30}"  # of a number: beyond that int() may refuse, and no float holds it
_MAX_INDEX = 4095  # of a device or core
_MAX_SECRET = 2**16  # characters of its file that are read


def read_value(flag: Flag, hint: Any, raw: object, where: str, *, is_text: bool) -> Any:
    """The typed value of `raw` for a field annotated `hint`. `is_text`: raw was typed on a command line.

    Raises ConfigError. Sizes come back in bytes, addresses and origins as a tuple, secrets as the text of their file.
    """
    kind = _without_none(hint)
    if flag.syntax == "addresses":
        return read_addresses(raw, where)
    if flag.syntax == "host":
        return _host(raw, where)
    if flag.syntax == "origins":
        return _origins(raw, where)
    if flag.syntax == "bytes" and isinstance(raw, str):
        return _in_bounds(flag, _bytes(raw, where), where)
    if flag.syntax == "secret":
        return _secret(raw, where)
    if flag.syntax == "ranges":
        parse_ranges(_string(raw, where), where)
        return raw
    if kind is bool:
        return raw if isinstance(raw, bool) else fail(where, raw, "true or false")
    if kind is int:
        return _in_bounds(flag, _integer(raw, where, is_text), where)
    if kind is float:
        return _in_bounds(flag, _float(raw, where, is_text), where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_choice(flag, raw, tuple(member.value for member in kind), where))
    text = _string(raw, where)
    return _choice(flag, text, flag.choices, where) if flag.choices else text


def parse_ranges(text: str, where: str) -> tuple[int, ...]:
    """Indices named by "0-3,5", in order, without repeats. Raises ConfigError."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(rf"({_DIGITS})(?:-({_DIGITS}))?", part.strip())
        if match is None:
            fail(where, text, "indices like 0-3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= _MAX_INDEX:
            fail(where, text, f"ascending indices up to {_MAX_INDEX}")
        found.update(dict.fromkeys(range(first, last + 1)))
    return tuple(found)


def expand_home(text: str, where: str) -> Path:
    """The path `text`, with the home directory that a leading `~` or `~user` means. Raises ConfigError when there is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        fail(where, text, "a path without ~ (this machine knows no such home directory)")


def keys_of(api_key: str | None) -> tuple[str, ...]:
    """The keys that a setting holds, a line each: the first is sent, all are taken."""
    return tuple(line.strip() for line in (api_key or "").split("\n") if line.strip())


def check_key(api_key: str, where: str) -> None:
    """Raise ConfigError for API keys that no HTTP header carries; the message does not show them."""
    for key in keys_of(api_key):
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(
                f"{where}: a key of {len(key)} characters is not a word of printable ASCII; a header could not carry it"
            )


def check_keys(api_key: str | None, client_api_key: str | None) -> None:
    """Raise ConfigError for keys that no HTTP header carries, and for one of clients that protects nothing."""
    if api_key is not None:
        check_key(api_key, "--api-key")
    if client_api_key is None:
        return
    option = "--client-api-key"
    check_key(client_api_key, option)
    if api_key is None:
        what = "without it the services of the fleet ask for none; give it, too (or JDISAGG_API_KEY)"
        raise ConfigError(f"{option}: got it without --api-key: {what}")
    if set(keys_of(client_api_key)) & set(keys_of(api_key)):
        what = "a client would have the key that opens everything; choose another"
        raise ConfigError(f"{option}: got the same key as for --api-key: {what}")


def fail(where: str, got: object, wanted: str) -> NoReturn:
    """Raise the ConfigError of one bad value."""
    raise ConfigError(f"{where}: got {got!r}, wanted {wanted}")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return kind
    return hint


def _string(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not raw.strip():
        fail(where, raw, "a non-empty string")
    if "\0" in raw:
        fail(where, raw, "a string without NUL, which no path may hold")
    if any("\ud800" <= char <= "\udfff" for char in raw):  # so Python spells bytes of the command line that are none
        fail(where, raw, "text in UTF-8")
    return raw


def _choice(flag: Flag, raw: object, choices: tuple[str, ...], where: str) -> str:
    if isinstance(raw, str) and raw in choices:
        return raw
    advice = value_advice(flag.name, raw)
    of_role = f" with --role {flag.role}" if flag.role else ""
    fail(where, raw, f"one of {', '.join(choices)}{of_role}{'; ' if advice else ''}{advice}")


def _integer(raw: object, where: str, is_text: bool) -> int:
    if is_text and isinstance(raw, str) and re.fullmatch(rf"[+-]?{_DIGITS}", raw.strip()):
        return int(raw)
    if isinstance(raw, bool) or not isinstance(raw, int):
        fail(where, raw, "a whole number")
    return raw


def _float(raw: object, where: str, is_text: bool) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str) or (isinstance(raw, str) and not is_text):
        fail(where, raw, "a finite number")
    try:
        value = float(raw)
    except ValueError:
        fail(where, raw, "a number")
    except OverflowError:  # a whole number of a file may have any number of digits
        value = math.inf
    return value if math.isfinite(value) else fail(where, raw, "a finite number")


def _in_bounds(flag: Flag, value: Any, where: str) -> Any:
    if flag.minimum is not None and value < flag.minimum:
        fail(where, value, f"at least {flag.minimum:g}")
    if flag.maximum is not None and value > flag.maximum:
        fail(where, value, f"at most {flag.maximum:g}")
    return value


def _bytes(raw: str, where: str) -> int:
    match = re.fullmatch(rf"({_DIGITS}(?:\.\d+)?)\s*([A-Za-z]*)", raw.strip())
    if match is None or match[2].lower() not in _UNITS:
        fail(where, raw, "a number of bytes like 536870912, 512MiB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]


def read_addresses(raw: object, where: str) -> tuple[str, ...]:
    """HOST:PORT,HOST:PORT,.. or a list of them. Raises ConfigError."""
    found = _list(raw, where, "address", "addresses", "HOST:PORT")
    for address in found:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) <= 65535:
            brackets = ", an IPv6 host in brackets: [HOST]:PORT" if address.count(":") > 1 and "[" not in address else ""
            fail(where, address, f"HOST:PORT with a port of 1 to 65535{brackets}")
    return found


def _host(raw: object, where: str) -> str:
    """Where others connect to: a name, or an address that is one machine's."""
    text = _string(raw, where)
    try:
        address = ipaddress.ip_address(re.sub(r"^\[(.*)\]$", r"\1", text))
    except ValueError:
        return text if re.fullmatch(_HOST, text) else fail(where, text, "a host name or an address, without a port")
    return fail(where, text, "what others reach; a wildcard they take for themselves") if address.is_unspecified else text


def _origins(raw: object, where: str) -> tuple[str, ...]:
    found = _list(raw, where, "origin", "origins", "SCHEME://HOST[:PORT]")
    for origin in found:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            fail(
                where, origin, "'*' or an origin as browsers send it, SCHEME://HOST[:PORT] in small letters and without a path"
            )
    return found


def _list(raw: object, where: str, one: str, many: str, form: str) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        fail(where, raw, f"{many} {form}, separated by commas")
    found = tuple(part.strip() for part in parts if part.strip())
    if isinstance(raw, str) and not found:
        fail(where, raw, f"{form},..; leave it out for none")
    if len(set(found)) != len(found):
        fail(where, raw, f"every {one} once")
    return found


def _secret(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not raw.startswith("@"):
        raise ConfigError(f"{where}: a secret is not given in the open; put it in a file and pass @FILE")
    try:
        with expand_home(raw[1:], where).open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_SECRET + 1)
    except (OSError, ValueError) as error:  # no UTF-8, or a path that none can be
        raise ConfigError(f"{where}: cannot read the file {raw[1:]!r}: {error}") from error
    if len(text) > _MAX_SECRET:  # what is cut off could be half of a key
        raise ConfigError(f"{where}: the file {raw[1:]!r} has more than {_MAX_SECRET} characters of secrets")
    if not text.strip():
        raise ConfigError(f"{where}: the file {raw[1:]!r} is empty; its lines must be the secrets")
    return text.strip()
