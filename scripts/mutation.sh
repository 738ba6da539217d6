#!/usr/bin/env bash
# Breaks the host's bookkeeping on purpose, one small change at a time, and counts how often the unit tests notice.
# Usage: mutation.sh [--part sched|handoff|text|batch|router|roles|transfer] [pattern of mutant names ...]
# sched: scheduler, allocator and prefix index; handoff: both sides of the hand-off; text: tokens to text and stop strings;
# batch: what a batch reads, asks and writes; router: who gets a request, and the next attempt of one that lost its worker;
# roles: a worker's tick, and both sides of a hand-off as they are carried out.
# What is broken and which tests run is in pyproject.toml ([tool.mutmut], [tool.mutmut-PART]). Without a pattern all run: sched
# has 3500, 40 minutes on one core that is not shared, handoff 3200, 15 minutes, text 750, batch 1200 (each with a server on a
# socket), router 2500 (many with a fleet of workers on sockets: take it by module); JDISAGG_MUTATION_LIMIT_S (3600) bounds it.
# A pattern is like 'jdisagg.sched.pages.*'; what it leaves out is not in the table.
# Works on a copy in build/mutation/PART. Prints each survivor's change and the share of mutants noticed per module.
# MUTMUT=/path/to/mutmut uses that one.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /s/^# //p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
part=sched
if [ "${1:-}" = --part ]; then
  part=${2:?wanted sched, handoff, text, batch, router, roles or transfer behind --part}
  shift 2
fi
case $part in
  sched) rename= ;; # its section has the name that mutmut reads
  handoff | text | batch | router | roles | transfer) rename="s/^\[tool\.mutmut\]/[tool.mutmut-sched]/; s/^\[tool\.mutmut-$part\]/[tool.mutmut]/" ;;
  *) echo "mutation.sh: --part: wanted sched, handoff, text, batch, router, roles or transfer, got $part" >&2; exit 2 ;;
esac
mutmut=${MUTMUT:-.venv/bin/mutmut}
[ -x "$mutmut" ] || .venv/bin/python -m pip install --quiet --constraint constraints.txt mutmut
mutmut=$(realpath --no-symlinks "$mutmut")
python=$(realpath --no-symlinks .venv/bin/python)
export HYPOTHESIS_PROFILE=mutation JDISAGG_MACHINE_RULES=1800 JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE=1

work=build/mutation/$part
rm -rf "$work" # verdicts and the tests of each function are kept between runs, and do not notice changed tests or moved code
mkdir -p "$work"
cp -r jdisagg tests proto scripts "$work"
printf '%s\n' jax jax.numpy xxhash >"$work/imported_before_fork"
sed "$rename" pyproject.toml >"$work/pyproject.toml"
cd "$work"
[ "$part" != router ] || export JDISAGG_TEST_PATIENCE=0.2 # a lost request hangs
status=0
timeout "${JDISAGG_MUTATION_LIMIT_S:-3600}" nice -n 15 "$mutmut" run --max-children 1 "$@" >mutants.log 2>&1 || status=$?
[ "$status" = 0 ] || { tr '\r' '\n' <mutants.log | tail -n 40 >&2; echo "mutation.sh: mutmut ended with $status" >&2; }

(cd mutants && PYTHONPATH=. "$python" - >collected.log 2>&1) <<'EOF' ||
import json
import sys
from pathlib import Path

import pytest

covering = json.loads(Path("mutmut-stats.json").read_text())["tests_by_mangled_function_name"].values()
sys.exit(pytest.main(["-p", "no:cacheprovider", "--collect-only", "--quiet", *{name for names in covering for name in names}]))
EOF
  {
    grep ^ERROR mutants/collected.log >&2
    echo "mutation.sh: pytest does not find these tests by name: mutants in what they cover count as noticed and need not be" >&2
    status=1
  }

results() { "$mutmut" results --all true; }
for name in $(results | awk -F': ' '$2 == "survived" || $2 == "no tests" || $2 == "suspicious" { gsub(/ /, "", $1); print $1 }'); do
  "$mutmut" show "$name" | grep -E '^(# |[-+] )'
done
printf '%-32s %7s %7s %8s %7s\n' module mutants noticed survived percent
results | awk -F': ' '
  NF == 2 && $2 != "not checked" {
    gsub(/ /, "", $1); sub(/\.x(_|ǁ).*/, "", $1)
    noticed = $2 == "killed" || $2 == "timeout"
    num[$1]++; hit[$1] += noticed; num["total"]++; hit["total"] += noticed
  }
  END {
    for (name in num)
      printf "%-32s %7d %7d %8d %7.1f\n", name, num[name], hit[name], num[name] - hit[name], 100 * hit[name] / num[name]
  }' | sort
exit "$status"
