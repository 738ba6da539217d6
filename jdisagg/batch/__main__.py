"""`python -m jdisagg.batch --input in.jsonl --output out.jsonl [--model MODEL [serve flags] [--disagg] | --server URL]`.

What its exit statuses mean is in the text of `--help` (`command.EPILOG`).
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext

import httpx

from jdisagg.batch.command import Command, parse_command
from jdisagg.batch.finished import answered_by, check_finished, end_former_run, keep_answers
from jdisagg.batch.journal import Journal, check_writable, left_journal
from jdisagg.batch.lanes import Lanes, proxy_of
from jdisagg.batch.progress import say, shown
from jdisagg.batch.runner import run_batch
from jdisagg.batch.sender import Sender, Served, served_model
from jdisagg.batch.summary import Summary, summary
from jdisagg.core.errors import ConfigError, JdisaggError, Unavailable
from jdisagg.core.logs import setup_logs
from jdisagg.core.settings import API_KEY_VARIABLE
from jdisagg.core.values import check_key, keys_of
from jdisagg.serve.environment import allow_descriptors, keep_freed_memory, open_standard_streams, prepare_jax
from jdisagg.serve.tpu import claim_chips, find_tpu

EXIT_DONE, EXIT_STOPPED, EXIT_BAD_COMMAND = 0, 1, 2
GOES_ON = "the same command goes on from here"
_LOCAL_MODULE = "jdisagg.batch.local"  # imports jax: resolved once the environment is ready, and never for --server


def main(argv: Sequence[str], *, tidy: Callable[[], object] = lambda: None, what_next: str = GOES_ON) -> int:
    """Run one batch; returns the exit status. Interrupted while an engine starts it ends the process, after `tidy()`.
    `what_next` is said when it was interrupted, or stops."""
    interrupted = f"interrupted; {what_next}"
    try:
        command = parse_command(argv)
        with _ended_by_sigterm():
            while (found := _go_on(command, tidy, interrupted)) is None:
                pass
        for text in found.told(command.batch.output):
            say(text)
        return EXIT_DONE
    except JdisaggError as error:
        say(error.message)
        status = error.exit_status if isinstance(error, ConfigError) else EXIT_STOPPED
        if status == EXIT_STOPPED and what_next != GOES_ON:
            say(what_next)
        return status
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(interrupted)
        return EXIT_STOPPED


def _go_on(command: Command, tidy: Callable[[], object], interrupted: str) -> Summary | None:
    """Do what is left of the batch, and sum up its output. None: that is there only now, to be looked at like any other."""
    batch, again = command.batch, command.retry_failed
    journal = left_journal(batch.output, batch.header())
    with nullcontext() if journal is None else journal:
        if journal is not None and end_former_run(batch, journal):
            if again:
                return None
            found = summary(batch.output)
            asyncio.run(_say_complete(command, found, "the output of a former run is written now, complete"))
            return found
        if batch.output.exists() and (journal is None or not len(journal)):
            found = check_finished(batch, retry_failed=again)
            if found is not None:
                asyncio.run(_say_complete(command, found, "already complete"))
                if journal is not None:
                    journal.remove()
                return found
        check_writable(batch.output)
        is_ours = asyncio.run(_run(command, journal, tidy, interrupted))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the loop has left what the system does
        return summary(batch.output) if is_ours else None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


async def _say_complete(command: Command, found: Summary, what: str) -> None:
    """There is nothing more to do: `what` it is. Raises ConfigError when the server, if it is there, serves another model than
    the one that answered, or other weights, or speaks no HTTP."""
    had = answered_by(command.batch.output)
    if command.server is not None and had is not None:
        async with _open_client(command) as client:
            try:
                now = await served_model(Sender(client, patience_s=0.0))
            except Unavailable:
                now = had  # nobody can say
        _check_model(command, had, now)
    of = "" if had is None else f" by {_told(had)}"
    hint = ""
    if found.has_lines_to_retry:
        hint = "; --retry-failed asks again for what failed"
    elif found.num_failed:
        hint = "; what failed is no request: mend it in the input, and --retry-failed asks for those lines alone"
    say(f"{what}{of}, nothing was run{hint}")


def _check_model(command: Command, had: Served, now: Served) -> None:
    if not now.may_have_answered_as(had):
        who = "this engine" if command.server is None else "this server"
        raise ConfigError(
            f"--output: {command.batch.output} holds answers of {_told(had)}, {who} has {_told(now)}; remove it or "
            "choose another --output"
        )


def _told(model: Served) -> str:
    weights = "" if model.fingerprint is None else f" with weights {model.fingerprint[:16]}"
    return f"model {model.name!r}{weights}"


async def _run(command: Command, journal: Journal | None, tidy: Callable[[], object], interrupted: str) -> bool:
    """Answer what `journal`, a former run's, lacks, or a new one. False: another process has finished the batch meanwhile."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    batch = command.batch
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(_open_client(command))
        except asyncio.CancelledError:  # threads that compile or test an engine cannot be stopped; there is no answer to lose
            say(interrupted)
            tidy()
            os._exit(EXIT_STOPPED)
        sender = Sender(client, patience_s=command.patience_s)
        served = await served_model(sender)
        header = batch.header(served.name, served.fingerprint)
        if batch.output.exists() and (had := answered_by(batch.output)) is not None:
            _check_model(command, had, served)
        if journal is None:
            journal = stack.enter_context(Journal(batch.output, header))
        else:
            journal.check(header)
        if batch.output.exists():
            if not (command.retry_failed or len(journal)):
                journal.remove()
                return False
            await keep_answers(batch, journal)
        total = batch.num_lines
        try:
            with shown(total, len(journal), journal.num_failed, quiet=command.quiet) as on_progress:
                await run_batch(batch, journal, sender, on_progress)
        except (asyncio.CancelledError, JdisaggError):
            say(f"{len(journal)} of {total} are done")
            raise
        return True


def _open_client(command: Command) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """Of the server that was named, or of an engine in this process. Raises ConfigError for a key that cannot be sent."""
    config = command.batch.config
    timeout = httpx.Timeout(command.request_timeout_s, connect=10.0)
    if config is None:
        api_key = os.environ.get(API_KEY_VARIABLE, "")
        check_key(api_key, API_KEY_VARIABLE)
        headers = {"authorization": f"Bearer {keys[0]}"} if (keys := keys_of(api_key)) else {}
        lanes = Lanes()
        if (proxy := proxy_of(command.server or "")) is not None:
            say(f"the server is asked through the environment's proxy {proxy}; no_proxy names hosts that are asked directly")
        return httpx.AsyncClient(base_url=command.server or "", timeout=timeout, headers=headers, transport=lanes)
    config = claim_chips(config, os.environ, find_tpu(os.environ))
    keep_freed_memory(os.environ)
    prepare_jax(config, os.environ)
    return importlib.import_module(_LOCAL_MODULE).open_local(config, timeout)


def _process() -> int:
    """`main` with logs on stderr: loading and compiling a model takes a while, and says so."""
    open_standard_streams()
    try:
        setup_logs("batch")
    except ConfigError as error:
        say(error.message)
        return EXIT_BAD_COMMAND
    allow_descriptors()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_process())
