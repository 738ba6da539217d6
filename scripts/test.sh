#!/usr/bin/env bash
# Every check and test: set-up, then scripts/checks.py. --quick leaves out kernels, golden and e2e.
# Usage: scripts/test.sh [--quick] [pytest arguments]
set -euo pipefail
case "${1:-}" in -h|--help) sed -n '2,/^set /s/^# //p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
scripts/setup.sh --test --accelerator "${JDISAGG_ACCELERATOR:-cpu}"
exec .venv/bin/python scripts/checks.py "$@"
