"""Scheduler calls as JSON and back: dataclasses, enums and request errors carry their type's name, sequences become tuples."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from jdisagg.core import errors
from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import (
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    Output,
    Provenance,
    Role,
    SamplingParams,
    TokenLogprob,
)
from jdisagg.sched.plan import Admit, HostCopy, PageAppend, PageCopy, Plan, PrefillChunk, Sampled, StepResult
from jdisagg.sched.table import Reserved

_TAG = "$"
_DATACLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(Admit, HostCopy, PageAppend, PageCopy, Plan, PrefillChunk, Sampled, StepResult, Reserved),
        *(EngineRequest, Grammar, Output, Provenance, SamplingParams, SchedulerConfig, TokenLogprob),
    )
}
_ENUMS: dict[str, type[Enum]] = {cls.__name__: cls for cls in (FinishReason, GrammarKind, Role)}


def encode(value: Any) -> Any:
    """JSON-able form; fields at their default are left out. TypeError for a type that no scheduler call uses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {_TAG: "dict", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    name = type(value).__name__
    if isinstance(value, Enum) and name in _ENUMS:
        return {_TAG: name, "value": value.value}
    if isinstance(value, errors.RequestError):
        return {_TAG: name, "message": value.message}
    if is_dataclass(value) and name in _DATACLASSES:
        stored = ((f.name, f.default, getattr(value, f.name)) for f in fields(value))
        return {_TAG: name, **{key: encode(v) for key, default, v in stored if v is not default and v != default}}
    raise TypeError(f"a schedule log cannot hold {name}")


def decode(value: Any) -> Any:
    """Inverse of `encode`; lists come back as tuples. KeyError for a type name this build does not know."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    name = value[_TAG]
    if name == "dict":
        return {decode(k): decode(v) for k, v in value["items"]}
    if name in _ENUMS:
        return _ENUMS[name](value["value"])
    content = {key: decode(v) for key, v in value.items() if key != _TAG}
    if name in _DATACLASSES:
        return _DATACLASSES[name](**content)
    error = getattr(errors, name, None)
    if isinstance(error, type) and issubclass(error, errors.RequestError):
        return error(content["message"])
    raise KeyError(f"unknown type {name!r} in a schedule log")
