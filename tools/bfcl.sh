#!/bin/sh
# Runs the tests of BFCL's environment with BFCL's package; arguments go to pytest.
#
#     tools/bfcl.sh [-x]
#
# The package asks for the clients of many services, which its checks do without. So it
# lies alone in build/bfcl, and not in .venv.
set -eu
cd "$(dirname "$0")/.."

folder=build/bfcl
wanted="bfcl-eval==2026.3.23 mpmath"
if [ ! -f "$folder/complete" ] || [ "$(cat "$folder/complete")" != "$wanted" ]; then
    rm -rf "$folder"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$folder" $wanted
    printf '%s\n' "$wanted" >"$folder/complete"
fi
PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/python -m pytest \
    tests/envs/bfcl "$@"
