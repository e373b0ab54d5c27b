#!/bin/sh
# Compares with transformers: its checkpoints loaded here, and ours loaded there.
#
# torch needs an environment of its own. PARITY_PYTHON is a Python with torch and
# transformers; without it, build/parity is made, which downloads a few gigabytes.
set -eu
cd "$(dirname "$0")/.."

theirs=${PARITY_PYTHON:-build/parity/bin/python}
if [ -z "${PARITY_PYTHON:-}" ] && [ ! -f build/parity/complete ]; then
    rm -rf build/parity
    .venv/bin/python -m venv build/parity
    "$theirs" -m pip install --quiet --disable-pip-version-check \
        "torch>=2.6" "transformers>=5" "peft>=0.19.1" safetensors numpy
    : >build/parity/complete
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$theirs" tests/parity/make_fixtures.py "$work/fixtures"
"$theirs" tests/parity/make_chat_fixtures.py "$work/fixtures"
"$theirs" tests/parity/adapters/theirs.py write "$work/fixtures" "$work/adapters"
"$theirs" tests/parity/classifiers/theirs.py write \
    "$work/fixtures" "$work/classifiers"
.venv/bin/python -m pytest tests/parity --parity-fixtures "$work/fixtures"
.venv/bin/python tests/parity/save_ours.py "$work/fixtures" "$work/saved"
"$theirs" tests/parity/check_saved.py "$work/fixtures" "$work/saved"
.venv/bin/python tests/parity/adapters/save_ours.py \
    "$work/fixtures" "$work/adapters_saved"
"$theirs" tests/parity/adapters/theirs.py check \
    "$work/fixtures" "$work/adapters_saved"
.venv/bin/python tests/parity/classifiers/save_ours.py \
    "$work/classifiers" "$work/classifiers_saved"
"$theirs" tests/parity/classifiers/theirs.py check \
    "$work/classifiers" "$work/classifiers_saved"
.venv/bin/python -m tests.parity.train_families "$work/fixtures" "$work/trained"
"$theirs" tests/parity/check_trained.py "$work/trained"
