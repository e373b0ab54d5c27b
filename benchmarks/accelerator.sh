#!/bin/sh
# Measures an accelerator, most important first, each part within a limit of time.
#
#     benchmarks/accelerator.sh DIRECTORY [PART...]
#
# Parts, in this order without a list: device, head, attention, decode, step, rollout,
# model, float32, plain. The first four take at most 9 minutes together, and so do the
# next three, and the last two, for machines that end a command after 10. A line of
# kernels took 10 s on an H200, most of it before it was timed. Each implementation is
# compared with the reference first, and "plain" times the reference, XLA's program with
# all logits or scores in memory, where they fit. Results lie in DIRECTORY, as JSON,
# and all that was printed in DIRECTORY/log. A part of kernels that is cut off keeps what
# it measured.
#
# A machine without a network lacks some packages. On one that has it,
# `tools/wheels.sh build/wheels` downloads them; then, over there:
#
#     python3 -m pip install --no-index --no-deps --target build/site build/wheels/*.whl
#     PYTHONPATH=build/site PYTHON=python3 benchmarks/accelerator.sh DIRECTORY
set -u
cd "$(dirname "$0")/.."

out=${1:?benchmarks/accelerator.sh DIRECTORY [PART...]: where results are written}
shift
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

# Runs a command for at most so many seconds.
run() {
    seconds=$1
    shift
    echo "== $part: $*" | tee -a "$out/log"
    timeout -k 10 "$seconds" "$@" >"$out/part" 2>&1
    status=$?
    cat "$out/part" >>"$out/log"
    tail -n 30 "$out/part"
    rm "$out/part"
    echo "== $part: status $status at $(date +%T)" | tee -a "$out/log"
}

kernels() {
    seconds=$1
    shift
    run "$seconds" "$python" -m benchmarks.kernels --json "$out/$part.json" "$@"
}

# A model of this size, in bfloat16: decoding of 256 samples with a context of 1,024.
decoding() {
    run 100 "$python" -m benchmarks.rollout --shape "$1" --dtype bfloat16 --kinds fixed \
        --slots 256 --prompts 32 --prompt-tokens 768 --max-tokens 256 --repeats 2 \
        --json "$out/rollout_$1.json"
}

fast="xla pallas_tpu pallas_gpu"
for part in ${*:-device head attention decode step rollout model float32 plain}; do
    case $part in
    device) run 40 "$python" -c "import jax; print(jax.__version__, jax.devices())" ;;
    head) kernels 170 --operations token_logprob next_token --by $fast ;;
    attention)
        kernels 200 --operations attention --packs causal ragged --by $fast cudnn tokamax
        ;;
    decode) kernels 120 --operations decode_attention --by $fast ;;
    step)
        run 200 "$python" -m benchmarks.grpo_step --shape qwen2.5-1.5b --dtype bfloat16 \
            --prompt-tokens 256 --max-tokens 224 --microbatch-rows 4 --repeats 3 \
            --json "$out/grpo_step.json"
        ;;
    rollout)
        decoding qwen2.5-0.5b
        decoding qwen2.5-1.5b
        ;;
    model) decoding llama-3.1-8b ;;
    float32)
        kernels 170 --dtype float32 --shapes qwen2.5-0.5b qwen2.5-1.5b --by $fast
        ;;
    plain) kernels 300 --packs causal ragged --by reference ;;
    *)
        echo "no part '$part': device head attention decode step rollout model float32 plain" >&2
        exit 2
        ;;
    esac
done
