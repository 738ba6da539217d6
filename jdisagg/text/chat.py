"""Chat templates: messages to the prompt text a model was tuned on.

Rendered as Hugging Face does (its documented environment: trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`), in a sandbox: templates come with checkpoints and are not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from io import StringIO
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jdisagg.core.errors import ConfigError, InvalidRequest
from jdisagg.text.content_form import ContentForm, find_form, in_form, shows_all_systems
from jdisagg.text.developers import as_one_system, as_systems, has_developer

_STUMBLES = (  # over what clients send
    *(TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, AssertionError, MemoryError),  # jinja2's own filters and globals raise these, too
)
_PROBE_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "Probe.", "parameters": {"type": "object"}}}]
_ROOM = " room"  # no template can name it
_LEAST_INDENTED = 2**16  # characters of JSON with indents, in one prompt
_MOST_INDENT = 32  # times the characters without: digits in lists of lists have 11
_MOST_INDENTED = 2**24


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; serving renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class _Known:
    """A template, and what is known of it."""

    template: jinja2.Template
    form: ContentForm
    knows_developers: bool  # others would leave theirs out
    shows_later_systems: bool


class ChatTemplate:
    """A model's compiled template, or the two of a model that has its own for tools, and the special tokens they may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`special_tokens`: variable name (`bos_token`) to text. `tool_source`: in place of `source` where tools are offered.
        Raises ConfigError when a template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self.has_two = tool_source is not None
        self._sources = (source, tool_source or "")
        of_tools = source if tool_source is None else tool_source
        try:
            self._plain = self._known(environment, source)
            self._of_tools = self._plain if tool_source is None else self._known(environment, tool_source, tools=_PROBE_TOOLS)
            self.shows_tools = "tools" in meta.find_undeclared_variables(environment.parse(of_tools))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def names(self, text: str) -> bool:
        """Whether it is written there."""
        return any(text in source for source in self._sources)

    def is_text_shown(self, *, of_tools: bool) -> bool:
        """Whether, of a conversation that was tried, text was seen in the prompt; `of_tools`: where tools are offered."""
        return (self._of_tools if of_tools else self._plain).form is not ContentForm.UNKNOWN

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """The prompt text, with `add_generation_prompt` unless the `variables` say otherwise. The content of a message is a
        string or a list of text parts; the template gets it in the form that it reads. Raises InvalidRequest when the template
        refuses the messages."""
        known = self._plain if tools is None else self._of_tools
        given = [in_form(known.form, dict(message)) for message in messages]
        fill = partial(self._fill, known.template, tools=tools, **variables)
        if known.knows_developers or not has_developer(given):
            return fill(given)
        if not known.shows_later_systems:
            return fill(as_one_system(given))
        try:
            return fill(as_systems(given))
        except InvalidRequest:
            with suppress(InvalidRequest):
                return fill(as_one_system(given))
            raise

    def _known(self, environment: jinja2.Environment, source: str, **probe: Any) -> _Known:
        """Compiled, and tried with these variables."""
        template = environment.from_string(source)
        form = find_form(partial(self._fill, template, **probe))
        return _Known(template, form, "developer" in source, shows_all_systems(partial(self._fill, template), form))

    def _fill(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """`render` with the messages as they are."""
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,  # nothing serves them; templates ask
                **({"add_generation_prompt": True} | self._special_tokens | variables | {_ROOM: _Room()}),
            )
        except (jinja2.TemplateError, *_STUMBLES) as error:
            told = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(told, field="messages") from error


class _Room:
    """How much JSON with indents one prompt may have: deep in other lists a number of two characters takes 800."""

    def __init__(self) -> None:
        self._earned, self._written = _LEAST_INDENTED, 0  # characters

    def add(self, num_plain: int, parts: Iterable[str]) -> str:
        """The text of `parts`, of what has `num_plain` characters without indents. Raises ValueError for too much."""
        self._earned += _MOST_INDENT * num_plain
        text = StringIO()  # a list of the parts would take many times as much
        for part in parts:
            self._written += text.write(part)
            if self._written > min(self._earned, _MOST_INDENTED):
                raise ValueError("as JSON with indents they are too long for what they say; nest them less")
        return text.getvalue()


@jinja2.pass_context
def _to_json(  # noqa: PLR0917  # templates may give them by place, as in transformers
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    num_plain = len(json.dumps(value, ensure_ascii=ensure_ascii))
    room: _Room = context[_ROOM]
    return room.add(num_plain, encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
