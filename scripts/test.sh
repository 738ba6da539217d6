#!/usr/bin/env bash
# Every check and test: set-up, then scripts/checks.py. --quick leaves out kernels, golden and e2e.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --test --accelerator "${JDISAGG_ACCELERATOR:-cpu}"
exec .venv/bin/python scripts/checks.py "$@"
