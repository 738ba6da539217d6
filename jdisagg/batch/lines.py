"""Input lines of a batch: OpenAI batch lines, or a prompt with its parameters, one JSON object each (`command.EPILOG`)."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from jdisagg.batch import strict_json
from jdisagg.core.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_SHORT_FORMS = {"prompt": COMPLETIONS, "token_ids": COMPLETIONS, "messages": CHAT}
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
_DEFAULT = "line-"  # and a number
_LIKE_A_DEFAULT = (_DEFAULT.encode(), b"\\u002", b"\\u006")  # literally, or one of its characters as an escape
_NO_SEED = (None, -1)  # vLLM's clients write -1


@dataclass(frozen=True, slots=True)
class Call:
    """A request to make. `number` counts input lines from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request; it becomes an error line of the output."""

    number: int
    custom_id: str | None
    message: str


@contextmanager
def open_input(path: Path) -> Iterator[BufferedReader]:
    """For reading. Raises ConfigError when there is no such file any more, or it may not be read, or cannot be to its end."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"--input: {path} cannot be read: {error.strerror}; mend that and run the same command again to go on from here"
        ) from error


def read_lines(path: Path, *, seed: int) -> Iterator[Call | BadLine]:
    """Every line that is not blank. A request without a seed gets `seed` + its line number: a rerun draws the same tokens.

    The second line of one custom_id is a bad line: its answer could not be told from the first one's. It is called after its
    number, as is any bad line without a custom_id; or nothing, where that is another line's custom_id: no two are the same.
    Raises ConfigError for a file that cannot be read.
    """
    return (line for line in read_lines_but(path, (), seed=seed) if line is not None)


def read_lines_but(path: Path, done: Container[int], *, seed: int) -> Iterator[Call | BadLine | None]:
    """Likewise, but for those whose numbers are `done`, of which nothing is looked at but their names. None for each of these,
    and for each that is looked at once more for its name: whoever asks may pause there."""
    first: dict[str, int] = {}  # custom_id -> its line
    taken: set[str] | None = None
    with open_input(path) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            if number in done:
                if (name := _name(number, raw)) is not None:
                    first.setdefault(name, number)
                yield None
                continue
            line = parse_line(number, raw, seed=seed)
            earlier = number if line.custom_id is None else first.setdefault(line.custom_id, number)
            if earlier != number:
                line = BadLine(number, None, _repeated(line, earlier))
            if line.custom_id is None:
                taken = (yield from _taken(path)) if taken is None else taken
                line = replace(line, custom_id=None if _named_after(number) in taken else _named_after(number))
            yield line


def _taken(path: Path) -> Generator[None, None, set[str]]:
    """The custom_ids of an input that another line may be called after its number. Parses no more lines than it must, and
    yields behind each."""
    taken: set[str] = set()
    with open_input(path) as file:
        for number, raw in enumerate(file, start=1):
            if any(part in raw for part in _LIKE_A_DEFAULT):
                name = _name(number, raw)
                if name is not None and name.startswith(_DEFAULT):
                    taken.add(name)
            yield
    return taken


def _named_after(number: int) -> str:
    return f"{_DEFAULT}{number}"


def _name(number: int, raw: bytes) -> str | None:
    """The custom_id that `parse_line` finds; only a line without one is looked at as closely."""
    fields = _fields(number, raw)
    if isinstance(fields, BadLine):
        return fields.custom_id
    custom_id = fields.get("custom_id")
    if custom_id is not None and strict_json.flaw(custom_id) is None:
        return custom_id
    return _request(number, fields, seed=0).custom_id


def parse_line(number: int, raw: bytes, *, seed: int) -> Call | BadLine:
    """One line; what is wrong with it is data, not an exception. A request without a custom_id is called after its number.

    A bad line is called nothing where it has none that can be used."""
    fields = _fields(number, raw)
    return fields if isinstance(fields, BadLine) else _request(number, fields, seed=seed)


def _fields(number: int, raw: bytes) -> dict[str, Any] | BadLine:
    """Of an object whose custom_id, if it has one, is a text."""
    try:
        fields = strict_json.decode(raw)
    except ValueError as error:
        return BadLine(number, None, f"line {number} is not JSON: {error}")
    if not isinstance(fields, dict):
        return BadLine(number, None, f"line {number}: wanted a JSON object, got {type(fields).__name__}")
    custom_id = fields.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        return BadLine(number, None, f"line {number}: custom_id must be a string, got {type(custom_id).__name__}")
    if custom_id == "":
        return BadLine(number, None, f"line {number}: custom_id is empty; give it a name, or leave it out")
    return fields


def _request(number: int, fields: dict[str, Any], *, seed: int) -> Call | BadLine:
    custom_id = fields.get("custom_id")
    if flaw := strict_json.flaw(fields):
        named = None if strict_json.flaw(custom_id) else custom_id
        return BadLine(number, named, f"line {number} cannot be sent as JSON: {flaw}")
    target = _envelope(fields) if "body" in fields or "url" in fields else _short_form(fields)
    if isinstance(target, str):
        return BadLine(number, custom_id, f"line {number}: {target}")
    url, body = target
    body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    if body.get("seed") in _NO_SEED:
        body["seed"] = (seed + number) % 2**32
    return Call(number, custom_id or _named_after(number), url, body)


def _repeated(line: Call | BadLine, earlier: int) -> str:
    return f"line {line.number}: custom_id {line.custom_id!r} is that of line {earlier}; give each line its own"


def _envelope(fields: dict[str, Any]) -> tuple[str, dict[str, Any]] | str:
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields.get("body")
    if method != "POST":
        return f"method must be POST, got {method!r}"
    if url not in (COMPLETIONS, CHAT):
        return f"url must be {COMPLETIONS} or {CHAT}, got {url!r}"
    if not isinstance(body, dict):
        return f"body must be an object, got {type(body).__name__}"
    return url, body


def _short_form(fields: dict[str, Any]) -> tuple[str, dict[str, Any]] | str:
    named = [name for name in _SHORT_FORMS if name in fields]
    if len(named) != 1:
        return f"wanted exactly one of prompt, token_ids, messages (or url and body), got {', '.join(named) or 'none'}"
    body = {key: value for key, value in fields.items() if key not in _ENVELOPE}
    if named[0] == "token_ids":
        if not isinstance(body["token_ids"], list):
            return f"token_ids: wanted a list of integers, got {body['token_ids']!r:.80}; a text is a prompt"
        body["prompt"] = body.pop("token_ids")
    return _SHORT_FORMS[named[0]], body
