#!/bin/sh
# Measures an accelerator: see benchmarks/accelerator/__main__.py, or --help.
#
#     benchmarks/accelerator.sh DIRECTORY [PART ...] [--seconds 520] [--dry]
#
# A machine with JAX, but without a network, lacks some packages. On one that has it,
# `tools/wheels.sh build/wheels` downloads them; over there they are installed into
# build/site, once. PYTHON is python3 if it is not set.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [ -d build/wheels ] && [ ! -d build/site ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target build/site \
        build/wheels/*.whl || { rm -rf build/site; exit 1; }
fi
export PYTHONPATH="build/site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.accelerator "$@"
