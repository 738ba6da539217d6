#!/usr/bin/env bash
# Makes .venv with the tested versions (constraints.txt). Does nothing when it is already right.
# Needs Python 3.11 or 3.12 and the package index.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  echo "usage: scripts/setup.sh [--accelerator auto|cpu|cuda13|tpu] [--test]"
  echo "  --accelerator  which jax to install; auto (default) looks for an NVIDIA GPU, then for a TPU, else cpu"
  echo "  --test         also what the tests need (a CPU build of torch among it)"
  echo "PYTHON=/path/to/python3.11 chooses the interpreter."
}
die() { echo "setup.sh: $*" >&2; exit 2; }

accelerator=auto test=no
while [ $# -gt 0 ]; do
  case "$1" in
    --accelerator) [ $# -ge 2 ] || die "--accelerator: wanted auto, cpu, cuda13 or tpu after it"; accelerator=$2; shift ;;
    --accelerator=*) accelerator=${1#*=} ;;
    --test) test=yes ;;
    -h|--help) usage; exit 0 ;;
    *) usage >&2; die "$1: unknown argument" ;;
  esac
  shift
done

has_tpu() { # chips among the PCI cards, as jax looks for them: v6e and later have no /dev/accel0
  local card
  for card in "$1"/*/device; do
    case "$(cat "${card%device}vendor" "$card" 2>/dev/null | tr '\n' ' ')" in
      "0x1ae0 0x005e "|"0x1ae0 0x0062 "|"0x1ae0 0x0063 "|"0x1ae0 0x006f "|"0x1ae0 0x0076 ") return 0 ;;
    esac
  done
  return 1
}
find_accelerator() {
  if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null 2>&1; then echo cuda13
  elif has_tpu /sys/bus/pci/devices || [ -e /dev/accel0 ] || [ -n "${TPU_NAME:-}${TPU_ACCELERATOR_TYPE:-}" ]; then echo tpu
  else echo cpu; fi
}
case "$accelerator" in
  auto) accelerator=$(find_accelerator) ;;
  cpu|cuda13|tpu) ;;
  *) die "--accelerator: got '$accelerator', wanted auto, cpu, cuda13 or tpu" ;;
esac

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }
if ! { [ -x .venv/bin/python ] && supported .venv/bin/python; }; then
  python=
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
    if supported "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || die "no Python 3.11 or 3.12 found; install one or set PYTHON"
  echo "setup.sh: making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv || die "'$python -m venv' failed; on Debian install python3-venv"
fi

extras=()
[ "$accelerator" = cpu ] || extras+=("$accelerator")
[ "$test" = no ] || extras+=(test)
wanted=$(.venv/bin/python - "$accelerator" <<'PY'
import hashlib, pathlib, sys, sysconfig
text = b"".join(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
place = f"{pathlib.Path.cwd()} {sysconfig.get_python_version()} {sys.argv[1]}".encode()
print(hashlib.sha256(text + place).hexdigest())
PY
)
stamp=.venv/jdisagg-$([ "$test" = yes ] && echo test || echo run).stamp
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  echo "setup.sh: .venv is current ($accelerator, test=$test)"
  exit 0
fi
owner=$(cat .venv/jdisagg-checkout 2>/dev/null || true)
if [ -n "$owner" ] && ! [ "$owner" -ef . ] && [ -x "$owner/scripts/setup.sh" ] && [ "$owner/.venv" -ef .venv ]; then
  die ".venv is that of $owner and would run this checkout's code from then on; remove it here (rm .venv), and run setup.sh again"
fi
spec=.
[ ${#extras[@]} -eq 0 ] || spec=".[$(IFS=,; echo "${extras[*]}")]"
echo "setup.sh: installing $spec (a few minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$spec"
if [ "$accelerator" = tpu ]; then # asking for devices would take the chips from who serves, or wait for a slice's other hosts
  .venv/bin/python -c 'import jax; print(f"setup.sh: jax {jax.__version__} for TPU")'
else
  .venv/bin/python -c 'import jax; print(f"setup.sh: jax {jax.__version__}, devices: {jax.devices()}")'
fi
pwd > .venv/jdisagg-checkout
echo "$wanted" > "$stamp"
[ "$test" = no ] || echo "$wanted" > .venv/jdisagg-run.stamp
