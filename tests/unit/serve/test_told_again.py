"""A process that is told to end once more when it has drained already, as systemd and a supervisor do."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

DRAINED = """
import sys, time
from jdisagg.serve.process import end_when_told, run_process

async def serve(process):
    return 0

end_when_told()
status = run_process(serve)
print("over", flush=True)
time.sleep(60)  # as jax takes its time to take itself down
sys.exit(status)
"""


def told_again(program: str, word: str, number: signal.Signals) -> tuple[int, str]:
    """The status and stderr of `program`, which gets the signal once it has written `word`."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{word}\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60.0)
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_again_when_all_is_done_ends_as_it_would_have(number: signal.Signals) -> None:
    assert told_again(DRAINED, "over", number) == (0, "")


LEAVING = """
import os, sys, time
from jdisagg.serve.process import end_when_told, run_process

class Late:
    def __del__(self, write=os.write, sleep=time.sleep):  # when Python has forgotten its handlers
        write(1, b"leaving\\n")
        sleep(1.0)

async def serve(process):
    return 3

end_when_told()
late = Late()
sys.exit(run_process(serve))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_again_while_python_takes_itself_down_ends_as_it_would_have(number: signal.Signals) -> None:
    assert told_again(LEAVING, "leaving", number) == (3, "")
