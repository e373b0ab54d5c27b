#!/bin/sh
# Everything that a lease of 25 minutes of an accelerator allows, most important first.
#
#     benchmarks/accelerator.sh DIRECTORY
#
# Correctness comes first, then what decides design. Each part has a deadline, and what it
# found lies in DIRECTORY when it ends, so that a lease that is cut off loses one part.
set -u
cd "$(dirname "$0")/.."

out=${1:?benchmarks/accelerator.sh DIRECTORY: where results are written}
mkdir -p "$out"
python=${PYTHON:-python}
export PYTHONUNBUFFERED=1

part() {
    name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "$name: status $? at $(date +%T)" | tee -a "$out/status"
    tail -n 30 "$out/$name.log"
}

part device 60 "$python" -c "import jax; print(jax.__version__, jax.devices())"
# Each implementation is compared with the reference before it is timed.
part head 240 "$python" -m benchmarks.kernels --operations token_logprob \
    --json "$out/token_logprob.json"
part attention 300 "$python" -m benchmarks.kernels --operations attention \
    --json "$out/attention.json"
part decode 180 "$python" -m benchmarks.kernels --operations decode_attention \
    --json "$out/decode_attention.json"
part step 240 "$python" -m benchmarks.grpo_step --shape small --dtype bfloat16 \
    --json "$out/grpo_step.json"
part rollout 240 "$python" -m benchmarks.rollout --dtype bfloat16 \
    --json "$out/rollout.json"
part exact 180 "$python" -m benchmarks.kernels --dtype float32 \
    --shapes qwen2.5-0.5b qwen2.5-1.5b --json "$out/float32.json"
