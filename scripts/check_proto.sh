#!/usr/bin/env bash
# Fails when jdisagg/v1 is not what scripts/gen_proto.sh makes of proto/. Usage: check_proto.sh EMPTY_DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/gen_proto.sh "$1"
status=0
for made in "$1"/jdisagg/v1/*; do
  diff -q "$made" "jdisagg/v1/$(basename "$made")" || status=1
done
[ $status = 0 ] || echo "run scripts/gen_proto.sh and commit the result"
exit $status
