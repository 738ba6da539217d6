"""Which format a model's tool calls have: the one that `--tool-call-parser` names, or the one that its chat template writes.

A template shows the model its own calls of earlier turns, so what it writes is what the model was tuned to write: it is given a
conversation with a call, and the format that reads just this call in what it makes of it is the model's.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from jdisagg.api.http.body import Body
from jdisagg.api.http.messages import render_prompt
from jdisagg.core.errors import InvalidRequest
from jdisagg.text.calls.format import CallFormat, ModelFormat
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.calls.reader import Argued, CallReader
from jdisagg.text.chat import ChatTemplate

log = logging.getLogger(__name__)

_NAME, _ARGUMENTS = "probe_1", {"city": "Oslo"}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Probe.", "parameters": _PARAMETERS}}
_CALL = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
_CALLED: list[dict[str, Any]] = [*_ASKED, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
_NAME_IT = "name the model's with --tool-call-parser, or force calls by tool_choice"


def choose_call_format(name: str, template: ChatTemplate | None) -> ModelFormat | None:
    """`name`: as the flag has it; None: calls stay text. Logs what was found."""
    if name != "auto":
        return FORMATS.get(name)
    if template is None or not template.shows_tools:
        return None
    written = _written_call(template)
    if written is None:
        log.info("tool calls stay text: the chat template shows no calls of earlier turns; %s", _NAME_IT)
        return None
    for found, call_format in FORMATS.items():
        if _is_read(call_format, written):
            log.info("tool calls are read as %s, as the chat template writes them (another format: --tool-call-parser)", found)
            return call_format
    log.info("tool calls stay text: the chat template writes them in none of the formats %s; %s", ", ".join(FORMATS), _NAME_IT)
    return None


def _written_call(template: ChatTemplate) -> str | None:
    """The message that is a call, as the template writes it, behind all else where the prompt of an answer begins a thought;
    None where it shows no calls."""
    try:
        asked, called = (render_prompt(Body({"messages": each, "tools": [_TOOL]}), template) for each in (_ASKED, _CALLED))
    except InvalidRequest:
        return None
    return called.removeprefix(asked)


def _is_read(call_format: CallFormat, text: str) -> bool:
    pieces = CallReader(call_format, {_NAME}).push(text)
    try:
        return json.loads("".join(piece.text for piece in pieces if isinstance(piece, Argued))) == _ARGUMENTS
    except ValueError:
        return False
