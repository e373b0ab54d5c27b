#!/bin/sh
# Compiles kernels and plans for TPUs that are not there; arguments go to pytest.
#
#     tools/kernels.sh [-m "not all"]
#
# libtpu, the compiler, lies in build/kernels and not in .venv: with it JAX looks for a
# TPU wherever it starts.
set -eu
cd "$(dirname "$0")/.."

wanted=$(.venv/bin/python - <<'PYTHON'
from importlib.metadata import requires

found = [line.partition(";") for line in requires("jax")]
print(*{name.strip() for name, _, extra in found if name.startswith("libtpu") and '"tpu"' in extra})
PYTHON
)
if [ ! -f build/kernels/complete ] || [ "$(cat build/kernels/complete)" != "$wanted" ]; then
    rm -rf build/kernels
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        --target build/kernels "$wanted"
    printf '%s\n' "$wanted" >build/kernels/complete
fi

PYTHONPATH="build/kernels${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/python -m pytest \
    --numprocesses 2 --dist load \
    tests/kernels/test_compiled_for_tpu.py tests/planning "$@"
