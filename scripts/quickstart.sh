#!/usr/bin/env bash
# Set-up, then a router, a prefill and a decode worker on the demo model, and one streamed request.
# Keeps serving until Ctrl-C; --once ends after the request.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in ''|--once) ;; *) echo "usage: scripts/quickstart.sh [--once]" >&2; exit 2 ;; esac
if [ ! -x .venv/bin/python ] || [ ! -e .venv/jdisagg-run.stamp ] || [ pyproject.toml -nt .venv/jdisagg-run.stamp ] \
    || [ constraints.txt -nt .venv/jdisagg-run.stamp ]; then
  scripts/setup.sh
fi
exec .venv/bin/python scripts/quickstart.py "$@"
