#!/usr/bin/env bash
# The speed table beside PyTorch, and the test-suite, on this machine's NVIDIA GPU: results go to benchmarks/results/gpu.
# Without a GPU it runs through too, with small models and on CPU, as a trial of itself, and keeps no results.
#
#     benchmarks/gpu.sh                                   # every encoder, case and dtype, then the tests
#     benchmarks/gpu.sh --encoder kimi_k25 --rounds 5     # what `python -m benchmarks.speed` takes
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv-gpu}
if nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null; then
  extras="cuda,media,test,parity" results="benchmarks/results/gpu" small=()
  export JAX_PLATFORMS=cuda
else
  echo "no NVIDIA GPU here: a trial on CPU, of small models"
  extras="media,test,parity" results=$(mktemp -d) small=(--small)
  export JAX_PLATFORMS=cpu XLA_FLAGS=
fi
# PyTorch's processes need memory beside ours
export XLA_PYTHON_CLIENT_PREALLOCATE=false

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --editable ".[$extras]"

"$venv/bin/python" -m benchmarks.speed "${small[@]}" --results "$results" "$@"
"$venv/bin/python" -m benchmarks.plots --results "$results"

# one device: tests of meshes ask for more, and are skipped (they run on virtual CPU devices elsewhere)
"$venv/bin/python" -m pytest -q ${TESTS:-tests}
