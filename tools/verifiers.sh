#!/bin/sh
# Runs verifiers' client for training against the server; arguments go to pytest.
#
#     tools/verifiers.sh [-x]
#
# verifiers pins packages that .venv has in other versions, so it needs an environment of
# its own. VERIFIERS_PYTHON is a Python with verifiers; without it, build/verifiers is made.
set -eu
cd "$(dirname "$0")/.."

if [ -z "${VERIFIERS_PYTHON:-}" ]; then
    VERIFIERS_PYTHON=build/verifiers/bin/python
    if [ ! -f build/verifiers/complete ]; then
        rm -rf build/verifiers
        .venv/bin/python -m venv build/verifiers
        "$VERIFIERS_PYTHON" -m pip install --quiet --disable-pip-version-check \
            "verifiers==0.4.0"
        : >build/verifiers/complete
    fi
fi
export VERIFIERS_PYTHON
.venv/bin/python -m pytest tests/serve/verifiers "$@"
