"""The files of a model's tokenizer, and what those beside tokenizer.json add to it: tokens and the names of special ones.

tokenizer.json should hold every token, and that of many a fine-tune does not. As in transformers: tokens of
`added_tokens_decoder` in tokenizer_config.json; where that is not there, special_tokens_map.json and added_tokens.json, which
checkpoints of before 2023-09 have instead; then the special tokens that have a name, and those that have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from jdisagg.core.errors import ConfigError
from jdisagg.core.files import why

T = TypeVar("T")

CONFIG_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
ADDED = "added_tokens"  # the key under which `read_tokenizer_config` gives the content of ADDED_FILE
_DECODER = "added_tokens_decoder"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNNAMED = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json with what older checkpoints keep in files beside it; empty where there is none of them. Raises
    ConfigError for a file that cannot be read."""
    config = _object_if_there(directory / CONFIG_FILE)
    if _DECODER in config:
        return {**config, ADDED: {}}
    return {**config, **_object_if_there(directory / MAP_FILE), ADDED: _object_if_there(directory / ADDED_FILE)}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name to text (`bos_token`, `image_token`) of special tokens by the result of `read_tokenizer_config`. Raises ConfigError
    for one that has no text."""
    named = {name: text for name in _NAMED if (text := _text(config.get(name))) is not None}
    named |= {key: _checked(text) for key, text in config.items() if key.endswith("_token") and isinstance(text, str)}
    for own in (config.get(_UNNAMED[0]), config.get("model_specific_special_tokens")):  # the latter as transformers 5 saves it
        if isinstance(own, dict):
            named |= {name: text for name, entry in own.items() if (text := _text(entry)) is not None}
    return named


def added_id(config: Mapping[str, Any], text: str) -> int | None:
    """The id that the files beside tokenizer.json give to a token. Raises ConfigError where they name no tokens."""
    return {token.content: index for index, token in (*_decoder(config), *_added(config))}.get(text)


def add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Give `backend` the tokens that it lacks. Raises ConfigError for what is no token."""
    backend.add_tokens([token for _, token in _decoder(config)])  # one that is there takes the flags that are given here
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for _, token in _added(config) if token.content not in known])
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    wanted = dict.fromkeys((*special_tokens(config).values(), *_unnamed(config)))
    backend.add_special_tokens([text for text in wanted if text not in known])


def decoder_of(backend: tokenizers.Tokenizer) -> Mapping[str, Any]:
    """The decoder as tokenizer.json has it; empty where there is none. The whole of that file, to look for it there, takes a
    vocabulary of 262k 0.6 s."""
    decoder: Any = backend.decoder
    return {} if decoder is None else json.loads(decoder.__getstate__())


def read(path: Path, reader: Callable[[Path], T]) -> T:
    """`reader(path)`, whose OSError, ValueError and RecursionError become a ConfigError that names the file."""
    try:
        return reader(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable: {why(path, error)}") from error


def _object_if_there(path: Path) -> dict[str, Any]:
    return read(path, _read_object) if path.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, wanted a JSON object")
    return value


def _text(entry: Any) -> str | None:
    """A special token is written as text or as an object with `content`. Raises ConfigError for anything else."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{CONFIG_FILE}: a special token is {entry!r}, wanted its text")
    return text if text is None else _checked(text)


def _checked(text: str) -> str:
    """Raises ConfigError for half a surrogate pair, which JSON may hold and no text does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{CONFIG_FILE}: a special token is {text!r}, wanted its text") from error
    return text


def _unnamed(config: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens without a name. Of the two keys the older one counts where the newer is empty."""
    key = next((key for key in _UNNAMED if config.get(key)), None)
    entries = [] if key is None else config[key]
    if isinstance(entries, dict):  # those have names
        return
    if not isinstance(entries, list):
        raise ConfigError(f"{CONFIG_FILE}: {key} is {entries!r}, wanted a list of tokens")
    yield from (text for entry in entries if (text := _text(entry)) is not None)


def _decoder(config: Mapping[str, Any]) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens of `added_tokens_decoder` in the order of their ids."""
    try:
        given = {int(index): entry for index, entry in (config.get(_DECODER) or {}).items()}
        flags = {index: {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry} for index, entry in given.items()}
        return [(index, tokenizers.AddedToken(given[index]["content"], **flags[index])) for index in sorted(given)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{CONFIG_FILE}: {_DECODER} is no table of ids and tokens: {error!r}") from error


def _added(config: Mapping[str, Any]) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens of added_tokens.json in the order of their ids; `add_tokens` makes those special that are."""
    given: Mapping[str, Any] = config.get(ADDED) or {}
    if not all(isinstance(index, int) for index in given.values()):
        raise ConfigError(f"{ADDED_FILE}: holds {dict(given)!r:.80}, wanted a table of tokens and ids")
    try:
        return [(index, tokenizers.AddedToken(text)) for text, index in sorted(given.items(), key=lambda item: item[1])]
    except UnicodeEncodeError as error:
        raise ConfigError(f"{ADDED_FILE}: {error.object!r} is no text: {error.reason}") from error
