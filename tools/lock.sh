#!/bin/sh
# Pins every dependency in requirements.lock; --upgrade takes the newest of each.
set -eu
cd "$(dirname "$0")/.."

uv=build/uv/bin/uv
if [ ! -x "$uv" ]; then
    .venv/bin/python -m venv build/uv
    build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi
# An explicit interpreter, because uv may fail on one of pyenv's shims. The lock names no
# index: the machine that installs the packages chooses it.
"$uv" pip compile --quiet --universal --python .venv/bin/python --python-version 3.12 \
    --extra math --extra envs --extra schema --extra parquet --extra hub --extra gguf \
    --extra pictures --extra ray --extra serve --extra tools --extra openenv --extra notebooks \
    --extra docs --extra dev \
    --no-emit-index-url --no-emit-find-links --no-annotate \
    --custom-compile-command "make lock" \
    --output-file requirements.lock "$@" pyproject.toml
