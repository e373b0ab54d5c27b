#!/bin/sh
# Makes .venv with the versions of requirements.lock, or does nothing if it is there.
#
#     tools/setup.sh [EXTRA,...]      PYTHON=/path/to/python3 chooses the interpreter
#
# The file .venv/installed-<extras> is written last, so that the next set-up notices an
# interrupted one and starts over.
set -eu
cd "$(dirname "$0")/.."

case ${1:-} in
-*)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
extras=${1:-}
stamp=.venv/installed-${extras:-core}
unfinished=.venv/unfinished
wanted="$(pwd) $(cksum <requirements.lock)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

say() { printf '%s\n' "$*" >&2; }

# A shim of pyenv may be on PATH but not run, and Debian packages venv separately.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if usable "$PYTHON"; then
            echo "$PYTHON"
            return
        fi
        say "PYTHON=$PYTHON is not a Python >= 3.12 with the modules venv and ensurepip."
        return 1
    fi
    pyenv_root=$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")
    for python in python3.13 python3.12 python3 python \
        "$pyenv_root"/versions/3.13*/bin/python3 \
        "$pyenv_root"/versions/3.12*/bin/python3; do
        if usable "$python"; then
            echo "$python"
            return
        fi
    done
    say "No Python >= 3.12 was found: tried python3.13, python3.12, python3, python and"
    say "the versions of pyenv. Install one (with venv: on Debian and Ubuntu the package"
    say "python3.12-venv), or name it: make PYTHON=/path/to/python3.12 ..."
    return 1
}

if [ -e "$unfinished" ]; then
    other=$(cat "$unfinished")
    if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then
        say "Another set-up is at work in .venv (process $other); wait for it."
        exit 1
    fi
    say "The last set-up was interrupted; starting over."
    rm -rf .venv
elif [ -d .venv ] && ! usable .venv/bin/python; then
    say ".venv has no Python >= 3.12 that runs; remove that folder and try again."
    exit 1
fi
if [ ! -d .venv ]; then
    python=$(find_python)
    say "Making .venv with $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
    mkdir .venv
    echo $$ >"$unfinished"
    "$python" -m venv .venv
fi

echo $$ >"$unfinished"
say "Installing what requirements.lock pins${extras:+, with $extras} (a minute or so) ..."
# Print only errors (-qq); compile modules when they are imported (--no-compile).
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile \
    --constraint requirements.lock --editable ".${extras:+[$extras]}"
rm -f "$unfinished"
echo "$wanted" >.venv/installed-core
echo "$wanted" >"$stamp"
# The core alone is for `make demo`, which uses none of this.
[ -z "$extras" ] || tools/absent.sh >&2 || true
