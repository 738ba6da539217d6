"""What a chat says to its template beside the messages: `chat_template_kwargs`, and the fields of other servers and clients
that say whether, and how much, the model is to think."""

from __future__ import annotations

from typing import Any

from jdisagg.api.http.body import Body, wrong_type
from jdisagg.core.errors import InvalidRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's, and vLLM's max
KINDS = {"enabled": True, "disabled": False, "auto": None}  # of `thinking`; None = says nothing
_VARIABLES, _ARGUMENTS = "chat_template_kwargs", "chat_template_args"  # vLLM's name and Dynamo's
_SWITCHES = ("enable_thinking", "thinking")  # as templates call it: Qwen's and GLM's, DeepSeek's and Kimi's
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "documents", "self"})
_BESIDE_EFFORT = ("enabled", "exclude")  # in OpenRouter's `reasoning`
_SPARE = (None, "", {})


def read_variables(body: Body) -> dict[str, Any]:
    """Variables of the template beside those it always has; those that are given as such go before all others. Raises
    InvalidRequest."""
    given, effort, switch = _given(body), _effort(body), _switch(body)
    body.number("thinking_budget")  # advice
    told: dict[str, Any] = {}
    if effort is not None:
        told |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}  # as vLLM
    if switch is not None and all(given.get(name, switch) == switch for name in _SWITCHES):
        told |= dict.fromkeys(_SWITCHES, switch)
    return told | given


def is_excluded(body: Body) -> bool:
    """Whether `reasoning` asks for a thought not to be shown, as OpenRouter has it."""
    inner = body.get("reasoning")
    return isinstance(inner, dict) and inner.get("exclude") is True


def _given(body: Body) -> dict[str, Any]:
    variables, arguments = body.object(_VARIABLES), body.object(_ARGUMENTS)
    if variables and arguments and variables != arguments:
        raise InvalidRequest.of(_ARGUMENTS, f"must equal {_VARIABLES} or be left out")
    name = _VARIABLES if variables else _ARGUMENTS
    if taken := sorted((variables | arguments).keys() & _RESERVED):
        told = f"{taken[0]} cannot be given there; messages, tools and add_generation_prompt are fields of the request"
        raise InvalidRequest.of(name, told)
    return variables | arguments


def _effort(body: Body) -> str | None:
    """`reasoning_effort`, or `reasoning` as OpenAI's Responses and OpenRouter write it."""
    effort, inner = body.get("reasoning_effort"), body.said("reasoning")
    if effort is not None and effort not in EFFORTS:
        raise wrong_type("reasoning_effort", f"one of {', '.join(EFFORTS)}", effort)
    if isinstance(inner, dict):  # see `is_excluded` and `_switch`
        inner = {name: value for name, value in inner.items() if name not in _BESIDE_EFFORT or not isinstance(value, bool)}
    if inner in _SPARE:
        return effort
    match inner:
        case {"effort": str(found), **others} if found in EFFORTS and not others:
            pass
        case _:
            wanted = f"an object that may have effort, one of {', '.join(EFFORTS)}, enabled and exclude, true or false"
            raise wrong_type("reasoning", wanted, inner)
    if effort not in (None, found):
        told = f"its effort must equal reasoning_effort = {effort} or be left out; got {found}"
        raise InvalidRequest.of("reasoning", told)
    return found


def _switch(body: Body) -> bool | None:
    """Whether to think, by the names that it has outside of `chat_template_kwargs`; None = not said."""
    told = {"enable_thinking": _boolean(body, "enable_thinking"), "thinking": _kind(body), "think": _boolean(body, "think")}
    if isinstance(inner := body.get("reasoning"), dict) and isinstance(enabled := inner.get("enabled"), bool):
        told["reasoning"] = enabled
    said = [(name, value) for name, value in told.items() if value is not None]
    for name, value in said[1:]:
        if value != said[0][1]:
            raise InvalidRequest.of(name, f"says the opposite of {said[0][0]}; leave out one of the two")
    return said[0][1] if said else None


def _boolean(body: Body, name: str) -> bool | None:
    value = body.get(name)
    if value in (None, ""):
        return None
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def _kind(body: Body) -> bool | None:
    """`thinking` as DeepSeek, Zhipu and Volcengine have it."""
    match body.said("thinking"):
        case None | "":
            return None
        case {"type": str(kind), **others} if kind in KINDS and not others:
            return KINDS[kind]
        case {**others} if not others:
            return None
        case other:
            raise wrong_type("thinking", f"an object of type alone, one of {', '.join(KINDS)}", other)
