"""`--role local` over fake children, as a program: arguments are serve's flags."""

import sys
from pathlib import Path

from jdisagg.core.logs import setup_logs
from jdisagg.core.settings import load_config
from jdisagg.serve.local import serve
from jdisagg.serve.process import run_process

if __name__ == "__main__":
    setup_logs("local")
    program = (sys.executable, str(Path(__file__).with_name("fake_child.py")))
    sys.exit(run_process(lambda process: serve(load_config(sys.argv[1:], {}), process, program)))
