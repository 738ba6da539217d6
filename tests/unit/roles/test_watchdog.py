"""The end of a process whose device hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

HANGS = """
import logging, os, time
from types import SimpleNamespace
from jdisagg.core.logs import setup_logs
from jdisagg.roles import watchdog

setup_logs("decode")
os.set_blocking(2, False)
try:
    while True:
        os.write(2, 4096 * b"x")
except BlockingIOError:
    os.set_blocking(2, True)
watchdog.STACKS_S = 1
if HOLDS_LOG:
    logging.getLogger().handlers[0].acquire()
engine = SimpleNamespace(ticks=1, step_running_s=lambda now_s: now_s, loop=SimpleNamespace(in_flight_text=lambda: "none"))
watchdog.Watchdog([engine], 0.2).start()
time.sleep(50)
"""


@pytest.mark.parametrize("holds_log", [False, True])
def test_a_hung_device_ends_the_process_also_where_nobody_reads_its_log(holds_log: bool) -> None:
    """`holds_log`: a thread has hung while it was writing to the log."""
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", f"HOLDS_LOG = {holds_log}{HANGS}"], stderr=writer) as process:
        try:
            assert process.wait(120) == -signal.SIGALRM
        finally:
            process.kill()
            os.close(writer)
            os.close(reader)
