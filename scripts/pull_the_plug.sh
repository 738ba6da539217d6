#!/usr/bin/env bash
# One prompt on two fleets side by side; in the middle, kill -9 of the decode worker of one. Exits 0 when both texts are
# identical. Takes a minute; the very first start also installs and compiles.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { echo "usage: scripts/pull_the_plug.sh" >&2; exit 2; }
if [ ! -x .venv/bin/python ] || [ ! -e .venv/jdisagg-run.stamp ] || [ pyproject.toml -nt .venv/jdisagg-run.stamp ] \
    || [ constraints.txt -nt .venv/jdisagg-run.stamp ]; then
  scripts/setup.sh
fi
exec .venv/bin/python scripts/pull_the_plug.py
