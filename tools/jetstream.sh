#!/bin/sh
# Runs the adapter for JetStream under JetStream; arguments go to pytest.
#
#     tools/jetstream.sh [-x]
#
# JetStream asks for TensorFlow, which the adapter does without. So it lies in
# build/jetstream with what it needs and .venv lacks, and not in .venv.
set -eu
cd "$(dirname "$0")/.."

folder=build/jetstream
wanted=$(.venv/bin/python - <<'PYTHON'
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

with open("pyproject.toml", "rb") as file:
    extra = tomllib.load(file)["project"]["optional-dependencies"]["jetstream"]
print("google-jetstream==0.2.2")
# The last one is of tiktoken.
for requirement in (*extra, "regex"):
    try:
        version(re.match(r"[\w-]+", requirement)[0])
    except PackageNotFoundError:
        print(requirement)
PYTHON
)
if [ ! -f "$folder/complete" ] || [ "$(cat "$folder/complete")" != "$wanted" ]; then
    rm -rf "$folder"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$folder" $wanted
    printf '%s\n' "$wanted" >"$folder/complete"
fi
PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/python -m pytest \
    tests/serve/jetstream "$@"
