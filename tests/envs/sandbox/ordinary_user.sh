#!/bin/sh
# Runs a Python module as a user without rights, for tests that root starts:
#
#     unshare --mount sh ordinary_user.sh EMPTY PYTHON PREFIX PROJECT MODULE [ARGUMENT...]
#
# Folders such as /root are closed to that user. In this process's own table of mounts,
# they are replaced by empty ones that hold only PREFIX, where the Python is, and PROJECT.
# EMPTY is an empty folder.
set -eu
kept=$1 python=$2 prefix=$3 project=$4
shift 4
mount -t tmpfs -o mode=755 none "$kept"
for folder in "$prefix" "$project"; do
    mkdir -p "$kept$folder"
    mount --bind "$folder" "$kept$folder"
done
for folder in "$prefix" "$project"; do
    above=$folder closed=
    while [ "$above" != / ]; do
        case $(stat -c %A "$above") in
        *[xt]) ;;
        *) closed=$above ;;
        esac
        above=$(dirname "$above")
    done
    if [ -n "$closed" ]; then
        mount -t tmpfs -o mode=755 none "$closed"
    fi
done
for folder in "$prefix" "$project"; do
    mkdir -p "$folder"
    mount --bind "$kept$folder" "$folder"
done
cd "$project"
exec setpriv --reuid=1234567 --regid=1234567 --clear-groups \
    env -i PATH=/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 "$python" -m "$@"
