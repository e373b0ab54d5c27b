#!/bin/sh
# Downloads what a machine with JAX, but without a network, lacks for the benchmarks.
#
#     tools/wheels.sh DIRECTORY [PYTHON] [PLATFORM]
#
# For Python 3.12 on x86-64 Linux unless told otherwise. Such a machine has jax, flax,
# optax, orbax-checkpoint, tokenizers, safetensors, jinja2, rich, cloudpickle and
# narwhals. tests/benchmarks/test_accelerator.py looks for what this list lacks.
set -eu
cd "$(dirname "$0")/.."

to=${1:?tools/wheels.sh DIRECTORY [PYTHON] [PLATFORM]}
version=${2:-3.12}
platform=${3:-x86_64}

mkdir -p "$to"
for name in array-record docstring-parser grain plotly portpicker tensorboardx \
    typeguard tyro; do
    pinned=$(sed -n "s/^\($name==[^ ;]*\).*/\1/p" requirements.lock)
    [ -n "$pinned" ] || { echo "requirements.lock has no $name" >&2; exit 1; }
    python3 -m pip download --quiet --no-deps --only-binary=:all: \
        --implementation cp --python-version "$version" \
        --platform "manylinux_2_28_$platform" --platform "manylinux_2_27_$platform" \
        --platform "manylinux_2_17_$platform" --platform "manylinux2014_$platform" \
        --dest "$to" "$pinned"
done
ls "$to"
