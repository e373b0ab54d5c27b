#!/bin/sh
# Runs the tests of BFCL's environment with BFCL's package; arguments go to pytest.
#
#     tools/bfcl.sh [-x]
#
# The package asks for the clients of many services, which its checks do without. So it
# lies alone in build/bfcl, and not in .venv.
set -eu
cd "$(dirname "$0")/.."

tools/beside.sh build/bfcl bfcl-eval==2026.3.23 mpmath
PYTHONPATH="build/bfcl${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/python -m pytest \
    tests/envs/bfcl "$@"
