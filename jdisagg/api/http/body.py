"""A JSON request body, read field by field. Types are checked here, ranges at intake. Unknown fields are ignored, but for those
that are nearly a known one.

null means absent, as at OpenAI.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from jdisagg.api.generation.context_length import Prompt
from jdisagg.api.generation.intake import MAX_SEQUENCES
from jdisagg.core.errors import Cancelled, InvalidRequest, Overloaded
from jdisagg.core.json_values import MAX_DEPTH, is_number, is_too_deep

MAX_BODY_BYTES = 16 * 2**20  # parsing them holds up everybody else for up to a second; see `num_structures` for those of lists
_INLINE_BYTES = 2**16  # a chat of more is rendered off the event loop: 16 MiB of messages take a second, some ten times
_NEAR = 0.85  # max_token is that near to max_tokens, logprobs is not to top_logprobs
_OF_OTHERS = frozenset({"models", "mode"})  # OpenRouter's, text-generation-webui's: they advise, and are not model misspelt
_MAX_COMPARED, _MAX_NAME = 32, 40  # unknown names that are compared with known ones, and their characters: each takes time
_MAX_SHOWN = 80  # characters of a wrong value
BODY_TIMEOUT_S = 60.0  # from the end of the headers to the end of the body
MAX_STRUCTURE = 65536  # lists, objects and keys: those of 20,000 messages, or of 1,024 prompts of token ids 64 times over
_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"[{:')
ROOM_BYTES = 2**29  # for bodies while they come in: 16 MiB each, and as many as connections, are more than a machine has
_RETRY_AFTER_S = 5.0
_HALF_PAIR = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])")  # as an escape


class Body:
    """The fields of one request."""

    def __init__(self, fields: dict[str, Any], num_bytes: int = 0, *, where: str = "") -> None:
        """`where`: what stands before the names of fields in messages, for an object in a body."""
        self._fields = fields
        self.where = where
        self.num_bytes = num_bytes
        self.is_long = num_bytes > _INLINE_BYTES
        self._known: set[str] = set()  # what was asked for
        self._unserved: dict[str, str] = {}  # why it is refused, by name
        self.names: dict[str, str] = {}  # of fields that intake calls otherwise, by its names: noted by who reads them

    def get(self, name: str) -> Any:
        """The raw value; None when absent."""
        self._known.add(name)
        return self._fields.get(name)

    def said(self, name: str) -> Any:
        """As `get`; of an object what is null is absent, too."""
        return _said(self.get(name))

    def unserved(self, name: str, why: str) -> Any:
        """As `said`, of a field that is refused for that when it asks for something: to it nobody is led who misspells one."""
        self._unserved[name] = why
        return _said(self._fields.get(name))

    def refuse_misspelt(self, *others: str) -> None:
        """When everything was read: raises InvalidRequest for a field that nobody asked for and that looks like one, but is
        none of `others`; for one that looks like a field that is refused, with what is told of that. Of many unknown ones the
        first few are looked at."""
        given = (name for name, value in self._fields.items() if value is not None)
        fields = self._known | self._unserved.keys()
        spelt_right = fields | _OF_OTHERS | {*others}
        unknown = (name for name in given if name not in spelt_right and len(name) <= _MAX_NAME)
        for name in islice(unknown, _MAX_COMPARED):
            if near := next(iter(get_close_matches(name, fields, n=1, cutoff=_NEAR)), ""):
                hint = f"did you mean {near}?" if near in self._known else f"{near}: {self._unserved[near]}"
                raise InvalidRequest.of(f"{self.where}{name}", f"is no field of this request; {hint}")

    def _get_typed(self, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
        """The raw value, None when absent. Raises InvalidRequest unless it `fits`."""
        value = self.get(name)
        if value is not None and not fits(value):
            raise wrong_type(f"{self.where}{name}", wanted, value)
        return value

    def number(self, name: str) -> float | None:
        """A JSON number."""
        return self._get_typed(name, "a number", is_number)

    def integer(self, name: str) -> int | None:
        """A JSON number without a fraction."""
        value = self._get_typed(name, "an integer", lambda value: is_number(value) and value == value // 1)
        return None if value is None else int(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._get_typed(name, "true or false", lambda value: isinstance(value, bool))
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """A string."""
        return self._get_typed(name, "a string", lambda value: isinstance(value, str))

    def texts(self, name: str) -> tuple[str, ...]:
        """One string or a list of strings."""
        value = self._get_typed(
            name, "a string or a list of strings", lambda value: isinstance(value, str) or _is_list(value, str)
        )
        return (value,) if isinstance(value, str) else tuple(value or ())

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers."""
        return tuple(self._get_typed(name, "a list of integers", _is_token_list) or ())

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of JSON objects."""
        return self._get_typed(name, "a list of objects", lambda value: _is_list(value, dict)) or []

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return self._get_typed(name, "an object", lambda value: isinstance(value, dict)) or {}

    def prompts(self, name: str) -> tuple[Prompt, ...]:
        """OpenAI's `prompt`: text, token ids, or a list of either. A text may be empty, a list may not."""
        value = self.get(name)
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and value:
            if _is_token_list(value):
                return (tuple(value),)
            if len(value) > MAX_SEQUENCES and not is_number(value[0]):
                told = f"may hold at most {MAX_SEQUENCES} prompts; got {len(value)}, send several requests"
                raise InvalidRequest.of(name, told)
            if all(isinstance(item, str) or (_is_token_list(item) and item) for item in value):
                return tuple(item if isinstance(item, str) else tuple(item) for item in value)
        wanted = "a string, a non-empty list of token ids, or a non-empty list of either"
        raise wrong_type(f"{self.where}{name}", wanted, value)


class BodyRoom:
    """The memory of bodies that are not whole yet, all of this process together. Use from one event loop."""

    def __init__(self) -> None:
        self._num_bodies = self._num_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """For one body: call with the bytes of each part that came. That raises Overloaded when there is no room for it."""
        held = 0

        def add(num_bytes: int) -> None:
            nonlocal held
            if self._num_bytes + num_bytes > ROOM_BYTES:
                coming = f"{self._num_bodies} requests of {self._num_bytes} bytes together are being received"
                raise Overloaded(f"{coming}; come again", retry_after_s=_RETRY_AFTER_S)
            held += num_bytes
            self._num_bytes += num_bytes

        self._num_bodies += 1
        try:
            yield add
        finally:
            self._num_bodies -= 1
            self._num_bytes -= held


_room = BodyRoom()  # of this process


async def read_body(request: Request) -> Body:
    """Read and parse; raises InvalidRequest when it is not one JSON object, HTTPException when it is longer than
    MAX_BODY_BYTES, has more than MAX_STRUCTURE lists, objects and keys (413), is compressed (415) or comes too late (408),
    Overloaded when too much of others is on its way."""
    encoding = request.headers.get("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        raise HTTPException(415, f"the body has content-encoding {encoding[:80]}; send it without one")
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        with _room.hold() as add:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    if num_bytes > MAX_BODY_BYTES:
                        raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes; send several requests")
                    add(len(chunk))
                    chunks.append(chunk)
    except ClientDisconnect:
        raise Cancelled("the client went away while sending its request") from None
    except TimeoutError:
        late = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; got {num_bytes} bytes"
        raise HTTPException(408, late, headers={"connection": "close"}) from None
    return Body(_parse(b"".join(chunks)), num_bytes)


def _parse(raw: bytes) -> dict[str, Any]:
    if (num := num_structures(raw)) > MAX_STRUCTURE:
        raise HTTPException(413, f"the body has more than {MAX_STRUCTURE} lists, objects and keys; send several requests")
    try:
        fields = json.loads(raw.decode("utf-8-sig"))
        if num > MAX_DEPTH and is_too_deep(fields):
            raise RecursionError  # as whoever writes it again would
        if _HALF_PAIR.search(raw.replace(rb"\\", b"__")):  # no backslash that is escaped itself, nor two others side by side
            json.dumps(fields, ensure_ascii=False).encode()  # half of a pair is no character: nothing could tokenize it
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8, as JSON must be: byte {_shown_byte(error)}") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidRequest(f"the body has {half!r}, half of a pair of surrogates, which is no character") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {type(fields).__name__}")
    return fields


def num_structures(raw: bytes, at_most: int = MAX_STRUCTURE) -> int:
    """Lists, objects and keys of JSON text, before it is parsed; where they are more than that, a number beyond it. Takes a few
    milliseconds per MiB, whatever the text is.

    Every list and object costs the parser and the garbage collector a hundred times what its two characters cost to send: 16
    MiB of small lists hold up an event loop for nine seconds and take 766 MiB. Text and token ids of that size take less than
    a second.
    """
    signs = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    signs = signs.translate(None, _NO_STRUCTURE).replace(b'""', b"")  # two that meet change nothing for what lies around them
    parts = signs.split(b'"', 2 * at_most + 3)  # outside and inside of strings by turns; none is empty but the first and last
    return sum(map(len, parts[::2]))


def wrong_type(name: str, wanted: str, got: Any) -> InvalidRequest:
    """The error of a field that has another type."""
    return InvalidRequest.of(name, f"must be {wanted}; got {beginning(got)}")


def beginning(value: Any) -> str:
    """Of the JSON of a wrong value, for an error."""
    shown = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value[: _MAX_SHOWN + 1] if isinstance(value, str) else value):
        shown += part  # one by one: a list of millions is not written for its beginning
        if len(shown) > _MAX_SHOWN:
            return f"{shown[:_MAX_SHOWN]}..."
    return shown


def _said(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def _shown_byte(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x} at offset {error.start}"


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, of) for item in value)


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}  # no true or false; of millions in a tenth of a second
