#!/usr/bin/env bash
# Generates jdisagg/v1/*_pb2*.py from proto/. The output is committed; test.sh checks that it is current.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-.}
.venv/bin/python -m grpc_tools.protoc -Iproto --python_out="$OUT" --pyi_out="$OUT" --grpc_python_out="$OUT" proto/jdisagg/v1/*.proto
