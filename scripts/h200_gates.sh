#!/usr/bin/env bash
# Compiles every GPU kernel and the whole steps for an H200 that is not here: scripts/h200_gates.sh [few|steps|all]
# Wants .venv (scripts/setup.sh), ptxas on PATH, and 430 MB for the CUDA compiler of jax's version, in a directory of its own.
set -euo pipefail
case "${1:-}" in -h|--help) sed -n '2,/^set /s/^# //p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
extent="${1:-all}"
case "$extent" in few|steps|all) ;; *) echo "h200_gates.sh: wanted few, steps or all, got $extent" >&2; exit 2 ;; esac
home="${JDISAGG_CUDA_VENV:-.venv-cuda}"
version="$(.venv/bin/python -c 'import jax; print(jax.__version__)')"
command -v ptxas > /dev/null || { echo "h200_gates.sh: no ptxas on PATH; it comes with CUDA 13 (or the wheel nvidia-cuda-nvcc)" >&2; exit 2; }
if [ ! -x "$home/bin/python" ]; then
    .venv/bin/python -m venv "$home"
fi
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/jdisagg.pth"
"$home/bin/python" -m pip install --quiet --no-deps "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version"
JDISAGG_KERNEL_GATES="$([ "$extent" = all ] && echo full || echo few)" \
    "$home/bin/python" -m pytest -q -s -p no:cacheprovider tests/kernels/test_gpu_gates.py
"$home/bin/python" -m jdisagg.aot --gates "$extent" --topology h200:8
