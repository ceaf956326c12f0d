#!/usr/bin/env bash
# What a GPU shows that a CPU cannot, in under 8 minutes and without a network: all four modes with a model of
# Qwen2.5-0.5B's size (randomly initialised), each actor's peak memory against its share, the timeline, and overlap
# efficiency with and without MPS. Writes FOLDER/gpu_check.json and table.txt; without a GPU it says so and ends well.
#
#     scripts/gpu_check.sh [FOLDER]          # a new folder; default runs/gpu-check-<time>
#     scripts/gpu_check.sh --cpu [FOLDER]    # rehearsal on the CPU, with a model of two layers
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export HF_HUB_OFFLINE=1
rehearsal=
if [ "${1:-}" = --cpu ]; then rehearsal=--cpu; shift; fi
out=${1:-runs/gpu-check-$(date +%Y%m%d-%H%M%S)}

if [ -z "$rehearsal" ] && ! reason=$("$python" scripts/gpu_check.py gpu 2> /dev/null); then
    echo "skipped: ${reason:-torch cannot be imported by '$python'; set PYTHON}"
    exit 0
fi
[ ! -e "$out" ] || { echo "error: '$out' is there already; give a new folder" >&2; exit 2; }
mkdir -p "$out"
"$python" scripts/gpu_check.py model "$out" $rehearsal

bench() {  # FOLDER MODE..., in at most $limit seconds if that is set
    local folder=$1 small=(); shift
    if [ -n "$rehearsal" ]; then  # steps of a tenth of a second: dozens of them, so that one hiccup does not decide
        small=(--model.dtype float32 --grpo.num_steps 40 --grpo.max_new_tokens 16 --task.eval_size 4
               --resources.generator_gpu null --resources.reference_gpu null --resources.learner_gpu null)
    fi
    ${limit:+timeout "$limit"} "$python" scripts/benchmark.py --config scripts/configs/gpu_check.yaml \
        --model "$out/model" --repeats 1 --threads-sync 1 --modes "$@" --out "$folder" "${small[@]}"
}
bench "$out/plain" sync async staleness overlap

mps() {  # runs sync and overlap under MPS, or prints why not
    if [ -n "$rehearsal" ]; then echo "a rehearsal without a GPU"; return; fi
    if ! command -v nvidia-cuda-mps-control > /dev/null; then echo "nvidia-cuda-mps-control is not installed"; return; fi
    if [ "$SECONDS" -gt 300 ]; then echo "no time left: $SECONDS s gone"; return; fi
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)  # our own daemon: another's, and the GPU's settings, stay as they are
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    trap 'echo quit | nvidia-cuda-mps-control > /dev/null 2>&1 || true' EXIT
    if ! nvidia-cuda-mps-control -d > "$out/mps.log" 2>&1; then echo "the daemon does not start, see mps.log"; return; fi
    if ! timeout 60 "$python" -c "import torch; torch.ones(1, device='cuda')" >> "$out/mps.log" 2>&1; then
        echo "no CUDA program runs under it, see mps.log"
    elif ! limit=150 bench "$out/mps" sync overlap >> "$out/mps.log" 2>&1; then
        echo "the benchmark fails under it, see mps.log"
    fi
}
mps > "$out/mps.txt"
"$python" scripts/gpu_check.py report "$out" --seconds "$SECONDS" $rehearsal
