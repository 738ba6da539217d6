"""`tools` and `tool_choice` of a chat: the functions that its model may call, and the call that it has to make."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jdisagg.api.http.body import Body, beginning, wrong_type
from jdisagg.core.errors import InvalidRequest

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Function:
    """One of them, as it came."""

    name: str
    parameters: Any  # a JSON schema, if it is right; None = not given


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """`name`: of the function; None = the model chooses."""

    name: str | None


def read_functions(body: Body) -> list[Function]:
    """One for each of `tools`. Raises InvalidRequest for one without a name: nobody could call it."""
    return [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.objects("tools"))]


def may_call(body: Body) -> bool:
    """Whether the model may call functions of its own accord."""
    return bool(body.objects("tools")) and body.get("tool_choice") in (None, "auto")


def read_forced(body: Body) -> ForcedCall | None:
    """None: the model may answer in text. Raises InvalidRequest for a choice of no function that is offered."""
    tools, choice = body.objects("tools"), body.get("tool_choice")
    if choice in (None, "none", "auto"):
        return None
    forced = ForcedCall(None if choice == "required" else _chosen(choice))
    if not tools:
        raise InvalidRequest.of("tool_choice", "a call of no tools can be forced; give some, or leave it out")
    if forced.name is not None and forced.name not in (offered := read_parameters(body)):
        names = ", ".join(map(repr, offered))
        raise InvalidRequest.of("tool_choice", f"no function of tools is called {forced.name!r:.80}; tools has {names:.400}")
    return forced


def read_parameters(body: Body) -> dict[str, Any]:
    """Those of each function, by its name. Raises InvalidRequest for a name that no forced call can have."""
    parameters: dict[str, Any] = {}
    for index, function in enumerate(read_functions(body)):
        name, where = function.name, f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise wrong_type(where, "1 to 64 letters, digits, _ and -, for a call that is forced", name)
        if name in parameters:
            raise InvalidRequest.of(where, f"another function is called {name}, too; rename one")
        parameters[name] = function.parameters
    return parameters


def _function(where: str, tool: dict[str, Any]) -> Function:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(function, dict) and isinstance(name, str) and name:
        return Function(name, function.get("parameters"))
    wanted = 'must be named, as in {"type": "function", "function": {"name": "f", "parameters": {..}}}'
    raise InvalidRequest.of(f"{where}.function.name", f"{wanted}; got {beginning(name)}")


def _chosen(choice: Any) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise wrong_type("tool_choice", 'none, auto, required or {"type": "function", "function": {"name": ..}}', choice)
