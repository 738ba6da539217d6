"""The command line of a batch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from jdisagg.batch.journal import journal_path, temporary_path
from jdisagg.batch.runner import Batch
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import BY_NAME
from jdisagg.core.settings import API_KEY_VARIABLE, Parser, load_config

DESCRIPTION = """Run a file of requests offline. Kill it at any moment and start it again with the same command: it goes on
where it was, and the output is the one an undisturbed run would have written. Flags that are not listed here are
those of `python -m jdisagg.serve` and configure the engine of this process (--model, --max-num-seqs, ..)."""
EPILOG = """input lines, in any mixture; each may carry the parameters of the HTTP API:
  {"prompt": "def ", "max_tokens": 8}
  {"token_ids": [1, 2, 3], "temperature": 0}
  {"messages": [{"role": "user", "content": "Hello"}]}
  {"messages": [..], "tools": [{"type": "function", "function": {"name": "f", "parameters": {..}}}], "tool_choice": "required"}
  {"messages": [..], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {..}}}}
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def ", "max_tokens": 8}}
A "model" that is none but the served one's name fails; leave it out to use any.
A request that fails becomes an output line with its error; the others go on. So does the second line of one custom_id.
Line N is called line-N where it has no custom_id, or that of an earlier line (null if another line has that very custom_id),
and has the seed N + --seed where it has none, or -1.

The last line on stderr counts them: "N ok, M failed"; those before it name the first few that failed, and why.
Exit status: 0 every line has its answer or its error in the output, failed ones included; 1 stopped early, or the engine
could not be started now (the model cannot be fetched, say), the same command goes on from there; 2 a command that cannot be
run."""

_OF_SERVERS = frozenset(
    ("host", "port", "grpc_port", "advertise_host", "advertise_port", "router", "allowed_origins", "print_config")
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A parsed command line."""

    batch: Batch
    server: str | None  # URL that /v1 stands behind; None = an engine in this process
    patience_s: float
    request_timeout_s: float
    quiet: bool
    retry_failed: bool


def parse_command(argv: Sequence[str]) -> Command:
    """Raises ConfigError; exits only for `--help`."""
    parser = Parser(
        prog="python -m jdisagg.batch",
        allow_abbrev=False,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl", help="requests, one JSON object per line")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="answers, in the order of the input")
    parser.add_argument(
        "--server",
        metavar="URL",
        help="use this OpenAI-compatible server instead of an engine in this process "
        f"(its API key: {API_KEY_VARIABLE} in the environment)",
    )
    parser.add_argument("--disagg", action="store_true", help="prefill and decode on separate meshes of this process")
    parser.add_argument("--max-concurrency", type=int, default=32, metavar="N", help="requests under way at once (default 32)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="a request without a seed gets N + its line number (default 0)"
    )
    parser.add_argument(
        "--patience-s", type=float, default=120.0, metavar="S", help="stop when the server is away this long (default 120)"
    )
    parser.add_argument(
        "--request-timeout-s", type=float, default=3600.0, metavar="S", help="longest wait for one answer (default 3600)"
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="when all is done: ask again for the lines of the output that failed, which may be mended in the input before",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no word of progress (a bar on a terminal, else a line every 30 s)"
    )
    args, serve_flags = parser.parse_known_args(list(argv))
    if args.server is not None and (args.disagg or serve_flags):
        names = [flag.partition("=")[0] for flag in serve_flags] or ["--disagg"]
        key = f"; its API key is read from the environment, {API_KEY_VARIABLE}" if "--api-key" in names else ""
        raise ConfigError(f"--server: leave out {names[0]}, the server has its own settings{key}")
    server = None if args.server is None else _server_url(args.server)
    if args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency: wanted at least 1, got {args.max_concurrency}")
    if not args.patience_s >= 0:  # nor NaN
        raise ConfigError(f"--patience-s: wanted seconds, got {args.patience_s:g}")
    if not 0 < args.request_timeout_s < math.inf:
        raise ConfigError(f"--request-timeout-s: wanted seconds above 0, got {args.request_timeout_s:g}")
    for name, path in (("--input", args.input), ("--output", args.output)):
        if str(path) == "-":
            raise ConfigError(f"{name}: a batch that can be resumed needs a file, not a pipe; name one")
    with _usable("--input", args.input):
        if not args.input.is_file():
            path = str(args.input)
            flaw = f"{path}: a regular file is wanted, to be read again after an interruption" if args.input.exists() else ""
            raise ConfigError(f"--input: {flaw or f'no file {path!r}'}")
    with _usable("--output", args.output):
        output = args.output.resolve() if args.output.is_symlink() else args.output  # the link stays one
        _check_output(output, args.input)
    config = _engine_config(serve_flags, "colocated" if args.disagg else "unified") if args.server is None else None
    return Command(
        batch=Batch(input=args.input, output=output, seed=args.seed, max_concurrency=args.max_concurrency, config=config),
        server=server,
        patience_s=args.patience_s,
        request_timeout_s=args.request_timeout_s,
        quiet=args.quiet,
        retry_failed=args.retry_failed,
    )


def _engine_config(serve_flags: Sequence[str], role: str) -> Config:
    """Of the engine in this process. Raises ConfigError, also for flags of processes that a batch is not and does not start."""
    for name in (flag.partition("=")[0] for flag in serve_flags if flag.startswith("--")):
        known = BY_NAME.get(name.removeprefix("--").replace("-", "_"))
        if name == "--role":
            raise ConfigError(
                "--role: the engine of a batch has both phases; remove it (--disagg gives each a mesh of its own)"
            )
        if known is not None and (known.name in _OF_SERVERS or (known.only and role not in known.only)):
            disagg = ", or add --disagg" if "colocated" in known.only and known.name not in _OF_SERVERS else ""
            ask = "or ask a server that runs, by --server http://HOST:PORT"
            raise ConfigError(f"{name}: a batch computes in this process, and serves nobody; remove it{disagg}, {ask}")
    return load_config(["--role", role, *serve_flags])


def _server_url(given: str) -> str:
    """Without the /v1 that OpenAI's base URLs end in. Raises ConfigError for what nobody could be reached at."""
    url = given.rstrip("/").removesuffix("/v1").rstrip("/")
    if not _is_base(url):
        hint = f"http://{given}" if ":/" not in given and _is_base(f"http://{given}") else "http://HOST:PORT"
        raise ConfigError(f"--server: wanted a URL, got {given!r}; write {hint}")
    return url


def _is_base(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    host_and_port = parts.host and "%20" not in parts.host and (parts.port is None or 0 < parts.port < 2**16)
    return parts.scheme in ("http", "https") and bool(host_and_port) and not parts.query and not parts.fragment


@contextmanager
def _usable(flag: str, path: Path) -> Iterator[None]:
    """Raise ConfigError for a path that cannot even be looked at, as one with too long a name, or a loop of links."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: `resolve` met a loop
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{flag}: {str(path)!r} cannot be used: {why}; choose another") from error


def _check_output(output: Path, source: Path) -> None:
    if not output.name:  # "", "." and "/"
        raise ConfigError(f"--output: {str(output)!r} is a directory; choose another --output")
    if not output.parent.is_dir():
        raise ConfigError(f"--output: no directory {str(output.parent)!r}; make it first")
    for path in (output, journal_path(output), temporary_path(output)):
        if path.is_dir():
            raise ConfigError(f"--output: {str(path)!r} is a directory; remove it or choose another --output")
        if path.is_fifo() or (path == output and path.is_char_device()):  # opening or reading one waits for somebody
            raise ConfigError(f"--output: {str(path)!r} is no regular file; choose another --output")
        if path.exists() and path.samefile(source):
            raise ConfigError(f"--output: {str(path)!r} is the input and would be overwritten; choose another --output")
        if path.is_file():
            path.open("rb").close()  # of a former run, which may have been another user's
