#!/bin/sh
# Runs the adapter for JetStream under JetStream; arguments go to pytest.
#
#     tools/jetstream.sh [-x]
#
# JetStream asks for TensorFlow, which the adapter does without. So it lies in
# build/jetstream with what it needs and .venv lacks, and not in .venv.
set -eu
cd "$(dirname "$0")/.."

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
# shellcheck disable=SC2086
tools/beside.sh build/jetstream $wanted
PYTHONPATH="build/jetstream${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/python -m pytest \
    tests/serve/jetstream "$@"
