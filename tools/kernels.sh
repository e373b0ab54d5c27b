#!/bin/sh
# Compiles kernels and plans for TPUs and GPUs that are not there; arguments go to pytest.
#
#     tools/kernels.sh [-m "not all"]
#
# The compilers lie in build/kernels, one folder for TPUs and one for GPUs, and not in
# .venv: with them JAX looks for a device wherever it starts.
set -eu
cd "$(dirname "$0")/.."

# tested FOLDER ARGUMENT...
tested() {
    folder=build/kernels/$1
    shift
    PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/python -m pytest \
        --numprocesses 2 --dist load "$@"
}

libtpu=$(.venv/bin/python - <<'PYTHON'
from importlib.metadata import requires

found = [line.partition(";") for line in requires("jax")]
print(*{name.strip() for name, _, extra in found if name.startswith("libtpu") and '"tpu"' in extra})
PYTHON
)
jax=$(.venv/bin/python -c "import jax; print(jax.__version__)")

# The compilers for GPUs arrive while those for TPUs are at work.
tools/beside.sh build/kernels/gpu "jax-cuda12-plugin==$jax" "jax-cuda12-pjrt==$jax" nvidia-cuda-nvcc-cu12 &
gpu=$!
tools/beside.sh build/kernels/tpu "$libtpu"
status=0
tested tpu tests/kernels/test_compiled_for_tpu.py tests/planning/test_plan.py \
    tests/planning/test_prediction.py "$@" || status=$?
wait "$gpu"
tested gpu tests/kernels/test_compiled_for_gpu.py tests/planning/test_clusters.py "$@" || status=$?
exit "$status"
