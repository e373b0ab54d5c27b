#!/bin/sh
# Runs a Python module as a user without rights, for tests that root starts:
#
#     unshare --mount sh ordinary_user.sh USER EMPTY PYTHON PREFIX PROJECT MODULE [ARGUMENT...]
#
# Folders such as /root are closed to that user. In this process's own table of mounts,
# they are replaced by empty ones that hold only PREFIX, where the Python is, and PROJECT.
# EMPTY is an empty folder, USER the number of a user who runs nothing else: the kernel
# limits the processes of a user together.
set -eu
user=$1 kept=$2 python=$3 prefix=$4 project=$5
shift 5
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
exec setpriv --reuid="$user" --regid="$user" --clear-groups \
    env -i PATH=/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 "$python" -m "$@"
