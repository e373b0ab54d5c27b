#!/bin/sh
# Installs packages in a folder of their own, and not in .venv; or does nothing if they
# are there.
#
#     tools/beside.sh build/FOLDER PACKAGE...
#
# Their dependencies are not installed: what they need is in .venv, or named too. The
# file FOLDER/complete is written last, so that an interrupted set-up starts over.
set -eu
cd "$(dirname "$0")/.."

folder=$1
shift
if [ -f "$folder/complete" ] && [ "$(cat "$folder/complete")" = "$*" ]; then
    exit 0
fi
rm -rf "$folder"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$folder" "$@"
printf '%s\n' "$*" >"$folder/complete"
