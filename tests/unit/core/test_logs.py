"""Log lines: one per record, on stderr, at the asked level."""

import json
import logging
import os
import re
import subprocess
import sys
from datetime import datetime
from time import time

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.logs import OneLineFormatter, passed_on, setup_logs, to_stderr

PROGRAM = """
import logging
from jdisagg.core.logs import setup_logs
setup_logs("decode")
logging.getLogger("x").debug("hidden")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("x").exception("seen by %s", "me")
"""


def test_a_traceback_stays_on_one_stderr_line_with_role_and_pid() -> None:
    env = {k: v for k, v in os.environ.items() if k != "JDISAGG_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90, env=env, check=True)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d E decode\[\d+\] x: seen by me \| Traceback", line)
    assert "ZeroDivisionError" in line


def test_as_json_a_record_is_an_object_with_its_traceback() -> None:
    env = {**os.environ, "JDISAGG_LOG_FORMAT": "json"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90, env=env, check=True)
    (line,) = done.stderr.splitlines()
    record = json.loads(line)
    assert time() - 90 < datetime.fromisoformat(record.pop("time")).timestamp() < time()
    assert record.pop("exception").endswith("\nZeroDivisionError: division by zero")
    assert record.pop("pid") not in (None, os.getpid())
    assert record == {"level": "error", "role": "decode", "logger": "x", "message": "seen by me"}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"level": "error", "message": "seen"}', {"process": "decode-0", "level": "error", "message": "seen"}),
        ("E0000 add_port.cc: no \x1b port", {"process": "decode-0", "message": "E0000 add_port.cc: no \x1b port"}),
        ("17", {"process": "decode-0", "message": "17"}),
        (deep := 100_000 * "[", {"process": "decode-0", "message": deep}),
    ],
)
def test_a_childs_line_says_whose_it_is_in_either_form(line: str, wanted: dict[str, str]) -> None:
    assert json.loads(passed_on("decode-0", line, {"JDISAGG_LOG_FORMAT": "JSON"})) == wanted
    assert passed_on("decode-0", line, {}) == f"decode-0 | {line}"


UNSAYABLE = """
import logging
from jdisagg.core.logs import setup_logs
class Bad:
    def __str__(self): raise RuntimeError("no words")
setup_logs("decode")
logging.getLogger("x").warning("%d", "one")
logging.getLogger("x").warning("%s", Bad())
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_record_that_cannot_be_formatted_is_one_line_too(form: str) -> None:
    env = {**os.environ, "JDISAGG_LOG_FORMAT": form}
    done = subprocess.run([sys.executable, "-c", UNSAYABLE], capture_output=True, text=True, timeout=90, env=env, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    for number, line, why in zip((7, 8), lines, ("a real number is required, not str", "no words"), strict=True):
        text = line
        if form == "json":
            record = json.loads(line)
            text = record["message"] + record["exception"]
            assert (record["level"], record["logger"]) == ("warning", "x")
        assert f"this line cannot be formatted (<string>:{number})" in text
        assert why in text


GARBLED = """
import logging
from jdisagg.core.logs import setup_logs
setup_logs("decode")
class DecodeError(Exception): pass
for error in (DecodeError("corrupt"), DecodeError("corrupt"), KeyError("a bug")):
    try:
        raise error
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("Unexpected [%s]", type(error).__name__)
"""


def test_what_is_no_message_is_told_without_a_stack_and_seldom_and_a_bug_as_ever() -> None:
    env = {k: v for k, v in os.environ.items() if k != "JDISAGG_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", GARBLED], capture_output=True, text=True, timeout=90, env=env, check=True)
    garbled, bug = done.stderr.splitlines()
    assert garbled.endswith("a message that cannot be read was refused: Unexpected [DecodeError]")
    assert "Traceback" in bug


NO_TEXT = """
import logging
from jdisagg.core.logs import setup_logs
setup_logs("decode")
for _ in range(3):
    said = b"socket: Too many open files\\n\\x00\\xff\\xff"
    try:
        said.decode()
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", said)
try:
    said.decode()
except UnicodeDecodeError:
    logging.getLogger("grpc._cython.cygrpc").exception("Unexpected [UnicodeDecodeError]")
"""


def test_what_grpc_says_of_each_call_that_got_no_descriptor_is_told_without_a_stack_and_seldom() -> None:
    env = {k: v for k, v in os.environ.items() if k != "JDISAGG_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", NO_TEXT], capture_output=True, text=True, timeout=90, env=env, check=True)
    line, bug = done.stderr.splitlines()
    assert "the status of a call is no text: Invalid encoding on b'socket: Too many open files" in line
    assert "Traceback" not in line
    assert "Traceback" in bug


NO_HTTP = """
import asyncio
from jdisagg.api.http.server import HttpServer
from jdisagg.api.listening import listen
from jdisagg.core.logs import setup_logs

async def send(port, text):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()

async def app(scope, receive, send):
    raise AssertionError(scope)

async def main():
    server = HttpServer(app, listen())
    await server.start()
    for text in (b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n", b"\\x16\\x03\\x01\\x02\\x00", b"no http\\r\\n\\r\\n"):
        await send(server.port, text)
    await server.stop(0.0)

setup_logs("router")
asyncio.run(main())
"""


def test_what_is_no_http_is_told_seldom_and_says_where_grpc_goes() -> None:
    env = {k: v for k, v in os.environ.items() if k != "JDISAGG_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", NO_HTTP], capture_output=True, text=True, timeout=90, env=env, check=False)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if " W " in line]
    assert told.endswith(
        "what came on --port from 127.0.0.1 is no HTTP, and was refused; gRPC, that of workers too, goes to --grpc-port"
    )


def test_an_unknown_level_or_format_names_the_variable_and_the_choices() -> None:
    with pytest.raises(ConfigError, match="JDISAGG_LOG_LEVEL: got 'loud', wanted one of debug, info"):
        setup_logs("decode", {"JDISAGG_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match="JDISAGG_LOG_FORMAT: got 'xml', wanted one of text, json"):
        setup_logs("decode", {"JDISAGG_LOG_FORMAT": "xml"})


def test_newlines_in_a_message_become_bars() -> None:
    record = logging.LogRecord("n", logging.INFO, "", 0, "a\nb\n", None, None)
    assert OneLineFormatter("%(message)s").format(record) == "a | b"


def test_control_characters_become_escapes() -> None:
    record = logging.LogRecord("n", logging.INFO, "", 0, "request %s:\ra\0b", ("\x1b[2J",), None)
    assert OneLineFormatter("%(message)s").format(record) == r"request \x1b[2J:\ra\x00b"


def test_lines_that_were_lost_are_told_in_the_form_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream, os.fdopen(reader, encoding="utf-8") as read:
        monkeypatch.setattr(sys, "stderr", stream)
        outlet = to_stderr({"JDISAGG_LOG_FORMAT": "json"})
        outlet.write(2**20 * "y" + "\n")
        os.read(reader, 2**20)
        outlet.write("{}\n")
        assert read.readline() == "\n"  # of the one that was cut
        assert json.loads(read.readline()) == {"message": "1 lines were lost here: nobody read them"}
