"""The flags of `jdisagg.core.config`: every field, with the section it is in, what is said of it there, and whom it is for.

A flag that says whom a process talks to or what it starts (`Flag.only`) is refused where it would be ignored: somebody expects
something of it. The same key in a file, and engine settings given to a router, are remarked: such files and flags are shared
by the processes of a fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace

from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError

ROLES = ("unified", "prefill", "decode", "colocated", "router", "local")
ENGINE_SECTIONS = ("model", "cache", "scheduler", "transfer", "device")
_OF_ROUTERS_TOO = frozenset(
    (
        *("model", "served_model_name", "tool_call_parser", "reasoning_parser"),
        *("heartbeat_s", "dead_after_s", "lease_s", "cpu_affinity"),
    )
)
_OF_TEXT = frozenset(("tool_call_parser", "reasoning_parser"))  # which prefill workers make none of


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `name` is the TOML key; the command-line flag is `--` + the name with dashes."""

    section: str  # TOML section = field of Config
    name: str
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    syntax: str = ""  # "" | "bytes" (512MiB) | "ranges" (0-3,5) | "addresses" (HOST:PORT,..) | "host" | "origins" | "secret"
    aliases: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # the roles it is for; () = every role with an engine, or all (see `applies`)
    role_choices: tuple[tuple[str, tuple[str, ...]], ...] = ()  # roles that choose among fewer
    role: str = ""  # the choices are this role's

    @property
    def option(self) -> str:
        """The flag as typed."""
        return "--" + self.name.replace("_", "-")

    def of(self, role: str | None) -> Flag:
        """The flag with the choices that the role has; None = not known."""
        of_roles = dict(self.role_choices)
        return replace(self, choices=of_roles[role], role=role) if role in of_roles else self


FLAGS: tuple[Flag, ...] = tuple(
    Flag(section.name, field.name, **field.metadata)
    for section in fields(Config)
    if section.default_factory is not MISSING
    for field in fields(section.default_factory())
    if field.metadata
)
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(flag.section for flag in FLAGS))
# every name a key may have, aliases included -> its flag
BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases)}


def applies(flag: Flag, role: str) -> bool:
    """Whether a process of this role, or one it starts, looks at the setting."""
    if flag.only:
        return role in flag.only
    if role == "prefill" and flag.name in _OF_TEXT:
        return False
    return role != "router" or flag.section not in ENGINE_SECTIONS or flag.name in _OF_ROUTERS_TOO


def check_flags(names: Iterable[str], role: str) -> str | None:
    """Settings given on the command line. Raises ConfigError for the first that is for other roles alone; returns a remark
    on those that are ignored."""
    ignored = [BY_NAME[name] for name in names if not applies(BY_NAME[name], role)]
    for flag in ignored:
        if flag.only:
            roles = " or ".join(flag.only)
            raise ConfigError(
                f"{flag.option}: means nothing to --role {role}; it is for --role {roles} ({flag.help}); "
                "remove it, or choose that role"
            )
    listed = ", ".join(flag.option for flag in ignored)
    return f"{listed}: means nothing to --role {role}, ignored" if ignored else None


def remark_on_file(path: object, names: Iterable[str], role: str) -> str | None:
    """A remark on keys of a file that are for other roles alone."""
    foreign = [BY_NAME[name] for name in names if BY_NAME[name].only and not applies(BY_NAME[name], role)]
    listed = ", ".join(f"[{flag.section}] {flag.name}" for flag in foreign)
    return f"{path}: {listed}: means nothing to --role {role}, ignored" if foreign else None
