"""The flags of `jdisagg.core.config`: every field, with the section it is in, and what is said of it there."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace

from jdisagg.core.config import Config

ROLES = ("unified", "prefill", "decode", "colocated", "router", "local")


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
    only: tuple[str, ...] = ()  # the roles it is for; () = every role with an engine, or all (see `core.scope`)
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
