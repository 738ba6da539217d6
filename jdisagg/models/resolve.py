"""From the value of `--model` to a directory, and what its small JSON files say. No jax here: routers read these too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors

from jdisagg.core.errors import ConfigError, NotFetched
from jdisagg.core.files import no_access
from jdisagg.core.json_values import is_finite
from jdisagg.core.told import told
from jdisagg.core.values import expand_home
from jdisagg.text.tokenizer_files import added_id, read_tokenizer_config

HUB_FILES = ("*.json", "*.jinja", "tokenizer.model")
ORBAX = "orbax"  # the folder of an Orbax checkpoint
HUB_WEIGHTS = ("*.safetensors", f"{ORBAX}/**")
HUB_IGNORED = ("consolidated*", "original/*")  # the same weights once more, in their authors' form
INDEX = "model.safetensors.index.json"  # of weights in several files
ADAPTER = "adapter_config.json"  # of LoRA and its kin
_OTHERS = ("adapter_", "consolidated")  # how names of files begin that are an adapter, or the model in another form
_BUSY = frozenset((408, 429))  # what the Hub answers of itself, beside 5xx; other 4xx are of what it was asked
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """The directory of a model: "demo" (in the package), a directory, or a Hub id, whose local cache is asked first.
    Of a Hub id weights are fetched only with `weights`: they are gigabytes that a router never reads.

    Raises ConfigError when there is no such directory, or the Hub has no such model; NotFetched when it cannot be reached.
    """
    return local_model(name) or _from_hub(name, weights=weights)


def local_model(name: str) -> Path | None:
    """The directory of "demo" or of a path; None for a Hub id. Raises ConfigError."""
    if name == "demo":
        directory = Path(str(resources.files("jdisagg"))) / "demo"
        if not (directory / "config.json").is_file():
            raise ConfigError(f"--model demo: {directory} holds no model; reinstall the package")
        return directory
    path = expand_home(name, "--model")
    is_path = _is_path(name)
    try:
        if path.is_dir():
            directory = path.resolve()
            _check_access(directory)
            return directory
    except PermissionError as error:
        if is_path:  # else it is the working directory that may not be looked into
            raise _inaccessible(path, error) from error
    except OSError as error:  # a name that is too long for one, a disk that fails
        what = f"{told(name)} cannot be looked for: {error.strerror}"
        raise ConfigError(f"--model: {what}; give demo, a directory, or a Hub id (OWNER/NAME)") from error
    if is_path:
        raise ConfigError(f"--model: {name} is not a directory; give demo, a directory, or a Hub id (OWNER/NAME)")
    return None


def _is_path(name: str) -> bool:
    """Whether it can be no Hub id."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def has_weights(directory: Path) -> bool:
    """All the files of weights are there, as far as their index says: a download may have been cut off."""
    index = directory / INDEX
    if not index.is_file():
        return bool(weight_files(directory)) or has_orbax(directory)
    weight_map = read_object(index).get("weight_map")
    return isinstance(weight_map, dict) and all((directory / str(file)).is_file() for file in set(weight_map.values()))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model itself, where no index names them."""
    return sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith(_OTHERS))


def has_orbax(directory: Path) -> bool:
    """True when `load_orbax` has something to read."""
    return (directory / ORBAX).is_dir()


def _check_access(directory: Path) -> None:
    """Raise ConfigError for a directory that may not be looked into, or whose links lead to one."""
    entry = directory
    try:
        for entry in directory.iterdir():
            try:
                entry.stat()
            except PermissionError:
                raise
            except OSError:  # a link to nowhere or to itself, or removed just now: if it is needed, its reader says so
                continue
    except PermissionError as error:
        raise _inaccessible(entry, error) from error


def _inaccessible(path: Path, error: PermissionError) -> ConfigError:
    return ConfigError(f"--model: {path} may not be read: {no_access(error)}")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ConfigError when it is absent or not a JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        check_whole(directory)
        raise ConfigError(f"--model: {directory} has no config.json; give a Hugging Face or converted directory")
    return read_object(path)


def check_whole(directory: Path) -> None:
    """Raise ConfigError for the directory of an adapter, which is no model. Ask only where something is missing."""
    if (directory / ADAPTER).is_file():
        raise ConfigError(
            f"--model: {directory} holds an adapter ({ADAPTER}), wanted a whole model; merge it into its base first"
        )


def read_model_config(name: str) -> dict[str, Any]:
    """config.json alone of "demo", a directory, a file, or a Hub id: no weights need to be there, and none are fetched.

    Raises ConfigError when there is no such file, or it is not a JSON object.
    """
    path = expand_home(name, "--model")
    try:
        if path.is_file():
            return read_object(path)
    except PermissionError as error:
        raise _inaccessible(path, error) from error
    if name == "demo" or path.is_dir():
        return read_config(resolve_model(name))
    if _is_path(name) or name.endswith(".json"):
        wanted = "demo, the path of a config.json or of a directory that holds one, or a Hub id (OWNER/NAME)"
        raise ConfigError(f"--model: {name} is neither a file nor a directory; give {wanted}")
    if name.count("/") != 1:
        return read_config(resolve_model(name))
    return read_object(_config_from_hub(name))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, wanted a JSON object")
    return value


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a sequence: of generation_config.json, or else of config.json, and the tokenizer's own, which is all that
    some fine-tunes change; may be empty. Raises ConfigError for what is no id."""
    ids = _configured_eos(directory)
    beside = read_tokenizer_config(directory)
    named = beside.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    own = _token_id(_object_if_there(directory / "tokenizer.json"), text) if isinstance(text, str) else None
    if own is None and isinstance(text, str):
        own = added_id(beside, text)
    return ids if own is None or own in ids else (*ids, own)


def _configured_eos(directory: Path) -> tuple[int, ...]:
    for file, values in (("generation_config.json", _generation(directory)), ("config.json", read_config(directory))):
        if (value := values.get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i < 2**31 for i in ids):
                raise ConfigError(f"{file}: eos_token_id is {value!r}, wanted a token id or a list of them")
            return tuple(i for i in ids if i >= 0)  # -1 is some models' way to say none
    return ()


def generation_defaults(directory: Path) -> dict[str, float]:
    """Sampling parameters that the model's authors recommend (generation_config.json), for requests that name none.
    Raises ConfigError for what is no number; in what range one must be is the edge's to say."""
    values = _generation(directory)
    found = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
    for key, value in found.items():
        if not is_finite(value):
            raise ConfigError(f"generation_config.json: {key} is {value!r}, wanted a number")
    return found


def recommended_max_tokens(directory: Path) -> int | None:
    """`max_new_tokens` of generation_config.json: of answers to requests that say nothing of their length; None = not said.
    Raises ConfigError for what is no such number."""
    value = _generation(directory).get("max_new_tokens")
    if value is None:
        return None
    if not is_finite(value) or value < 1 or value != int(value):
        raise ConfigError(f"generation_config.json: max_new_tokens is {value!r}, wanted an integer of at least 1")
    return int(value)


def _generation(directory: Path) -> Mapping[str, Any]:
    return _object_if_there(directory / "generation_config.json")


def _object_if_there(path: Path) -> Mapping[str, Any]:
    return read_object(path) if path.is_file() else {}


def _token_id(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """Of a token that is written so, in the content of tokenizer.json; None when there is none. Raises ConfigError when that is
    no tokenizer's."""
    try:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        if text in added:
            return added[text]
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            return vocabulary.get(text)
        return next((index for index, (piece, _) in enumerate(vocabulary) if piece == text), None)  # Unigram: pairs in order
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"tokenizer.json: is not a tokenizer's file: {error!r}; download the model again") from error


def _from_hub(name: str, *, weights: bool) -> Path:
    _check_cache()
    wanted, ignored = ((*HUB_FILES, *HUB_WEIGHTS), HUB_IGNORED) if weights else (HUB_FILES, (*HUB_IGNORED, *HUB_WEIGHTS))
    patterns = {"allow_patterns": list(wanted), "ignore_patterns": list(ignored)}
    try:
        cached = Path(huggingface_hub.snapshot_download(name, local_files_only=True, **patterns))
        if _is_whole(cached, weights=weights):
            return cached  # else ask the Hub for the rest; what is there is its answer, too, when it cannot be reached
    except (hub_errors.LocalEntryNotFoundError, hub_errors.HFValidationError):
        pass  # not in the cache: ask the Hub, whose answer is the one worth reporting
    try:
        return Path(huggingface_hub.snapshot_download(name, **patterns))
    except Exception as error:  # the library has many kinds of them, and lets those of others through
        where = f"{name} is no directory, not in the local Hub cache, and"
        raise _unfetched(where, error, "demo, a directory, or a Hub id (OWNER/NAME) that is cached or reachable") from error


def _check_cache() -> None:
    """Raise ConfigError for a cache of the Hub that may not be looked into: the library takes it for an empty one."""
    cache = Path(hub_constants.HF_HUB_CACHE)
    try:
        if cache.is_dir():
            next(cache.iterdir(), None)
    except PermissionError as error:
        why = f"--model: the Hub cache {cache} may not be read: {no_access(error)}, or set HF_HOME to another"
        raise ConfigError(why) from error


def _is_whole(directory: Path, *, weights: bool) -> bool:
    """A cached snapshot has what is read of it: other programs fetch less."""
    if not all((directory / file).is_file() for file in ("config.json", "tokenizer.json")):
        return False
    return not weights or has_weights(directory)


def _config_from_hub(name: str) -> Path:
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", local_files_only=True))
    except (hub_errors.LocalEntryNotFoundError, hub_errors.HFValidationError):
        pass  # as above
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # as above
        where = f"config.json of {name} is not in the local Hub cache and"
        raise _unfetched(where, error, "the path of a config.json or of a directory that holds one") from error


def _unfetched(where: str, error: Exception, wanted: str) -> ConfigError:
    first = next(iter(str(error).strip().splitlines()), repr(error))
    kind = NotFetched if _may_pass(error) else ConfigError
    return kind(f"--model: {where} could not be fetched ({first}); give {wanted}")


def _may_pass(error: BaseException | None) -> bool:
    """It is of the network, or of a Hub that is down or busy; not of what that was asked, nor of this machine."""
    if isinstance(error, hub_errors.LocalEntryNotFoundError):
        return _may_pass(error.__cause__)  # it has not the file, and asked in vain for that reason
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in _BUSY
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, hub_errors.OfflineModeIsEnabled)
    return error is not None and not isinstance(error, ValueError)  # as of the library for HTTP
