"""`tools` of a chat: the functions that its model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.api.http.body import Body
from jdisagg.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Function:
    """One of them, as it came."""

    name: str
    parameters: Any  # a JSON schema, if it is right; None = not given


def read_functions(body: Body) -> list[Function]:
    """One for each of `tools`. Raises InvalidRequest for one without a name: nobody could call it."""
    return [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.objects("tools"))]


def may_call(body: Body) -> bool:
    """Whether the model may call functions of its own accord."""
    return bool(body.objects("tools")) and body.get("tool_choice") in (None, "auto")


def _function(where: str, tool: dict[str, Any]) -> Function:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(function, dict) and isinstance(name, str) and name:
        return Function(name, function.get("parameters"))
    wanted = 'must be named, as in {"type": "function", "function": {"name": "f", "parameters": {..}}}'
    raise InvalidRequest(f"{where}.function.name: {wanted}; got {name!r:.40}", field=f"{where}.function.name")
