#!/usr/bin/env bash
# What a GPU shows that a CPU cannot, in under 8 minutes and without a network, with a model of Qwen2.5-0.5B's size
# (randomly initialised): steps per second and overlap efficiency of the four modes, without and with MPS; both engines'
# tokens per second and mismatch floor; seconds of publishing; memory of each process against its share; a learner
# killed and recovered; TRL on the same work. A part that fails or has no time left says why, and the next one goes on.
# Writes FOLDER/gpu_check.json; without a GPU it says so and ends well.
#
#     scripts/gpu_check.sh [FOLDER]          # a new folder; default runs/gpu-check-<time>
#     scripts/gpu_check.sh --cpu [FOLDER]    # rehearsal of every part on the CPU, with a model of two layers
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export HF_HUB_OFFLINE=1
rehearsal= total=470
if [ "${1:-}" = --cpu ]; then rehearsal=--cpu total=840; shift; fi
out=${1:-runs/gpu-check-$(date +%Y%m%d-%H%M%S)}

gpu='import sys, torch; torch.cuda.is_available() or sys.exit(f"torch {torch.__version__} sees no GPU here")'
if [ -z "$rehearsal" ] && ! reason=$("$python" -c "$gpu" 2>&1 | tail -n 1); then echo "skipped: $reason"; exit 0; fi
[ ! -e "$out" ] || { echo "error: '$out' is there already; give a new folder" >&2; exit 2; }
mkdir -p "$out"
"$python" scripts/gpu_check.py model "$out" $rehearsal

work=(--config scripts/configs/gpu_check.yaml --grpo.model_name "$out/model")
under_mps=(sync async staleness overlap)
if [ -n "$rehearsal" ]; then  # steps of a tenth of a second: dozens of them, so that one hiccup does not decide
    work+=(--model.dtype float32 --grpo.num_steps 40 --grpo.max_new_tokens 16 --task.eval_size 4
           --resources.generator_gpu null --resources.reference_gpu null --resources.learner_gpu null)
    under_mps=(sync overlap)
fi

part() {  # NAME SECONDS SCRIPT...: at most so long; its output goes to NAME.log, and why it has no result to NAME.txt
    local name=$1 seconds=$2 left=$((total - SECONDS)) rc=0; shift 2
    [ -z "$rehearsal" ] || seconds=$((3 * seconds))
    [ "$seconds" -le "$left" ] || seconds=$left
    if [ "$seconds" -lt 15 ]; then echo "skipped: no time left" > "$out/$name.txt"; return; fi
    echo "$name ..."
    timeout -k 10 "$seconds" "$python" "$@" > "$out/$name.log" 2>&1 || rc=$?
    case $rc in
        0) ;;
        2) echo "skipped: $(tail -n 1 "$out/$name.log")" > "$out/$name.txt" ;;
        124 | 137) echo "failed: not done after $seconds s, see $name.log" > "$out/$name.txt" ;;
        *) echo "failed: $(tail -n 1 "$out/$name.log"), see $name.log" > "$out/$name.txt" ;;
    esac
}
bench() {  # NAME SECONDS MODE...
    part "$1" "$2" scripts/benchmark.py "${work[@]}" --repeats 1 --threads-sync 1 --out "$out/$1" --modes "${@:3}"
}
start_mps() {  # a daemon of our own: another's, and the GPU's settings, stay as they are
    [ -z "$rehearsal" ] || return 0
    if ! command -v nvidia-cuda-mps-control; then echo "skipped: nvidia-cuda-mps-control is not installed"; return 1; fi
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    trap 'echo quit | nvidia-cuda-mps-control > /dev/null 2>&1 || true' EXIT
    nvidia-cuda-mps-control -d && timeout 60 "$python" -c "import torch; torch.ones(1, device='cuda')" ||
        { echo "skipped: no daemon, or no CUDA program runs under it"; return 1; }
}

bench plain 170 sync async staleness overlap
(  # a shell of its own, with which daemon and environment end
    start_mps > "$out/mps.log" 2>&1 || { tail -n 1 "$out/mps.log" > "$out/mps.txt"; exit 0; }
    bench mps 130 "${under_mps[@]}"
)
for engine in hf vllm; do
    part "engine-$engine" 90 scripts/gpu_check.py "engine-$engine" "$out" "${work[@]}" --model.engine "$engine"
done
part recovery 70 scripts/gpu_check.py recovery "$out" "${work[@]}" --grpo.num_steps 6 --output.checkpoint_every 1000 \
    --output.dir "$out/recovery"
part trl 70 scripts/compare_trl.py speed --arms trl --trl-threads 1 --warm-up 2 "${work[@]}" --grpo.num_steps 8 \
    --output.dir "$out/trl"
"$python" scripts/gpu_check.py report "$out" --seconds "$SECONDS" "${work[@]}" $rehearsal
