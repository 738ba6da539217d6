#!/usr/bin/env bash
# Everything that needs a real GPU, in 545 s at most and without a network. Usage: gpu_check.sh --out DIR [--sections A,B]
# [--patience X] [--list] [--allow-cpu] [--allow-missing]; see docs/accelerators.md.
# Uses .venv when there is one, else $PYTHON or python3 with what is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD exec "$python" scripts/gpu_check.py "$@"
