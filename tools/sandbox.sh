#!/bin/sh
# Installs the programs that close a sandbox off, bubblewrap and gVisor, where root can
# have them from Debian's or Ubuntu's packages; elsewhere says how to. Tests of a sandbox
# that the machine lacks are skipped.
set -u
cd "$(dirname "$0")/.."

missing=
command -v bwrap >/dev/null 2>&1 || missing=bubblewrap
command -v runsc >/dev/null 2>&1 || missing="$missing runsc"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    exec tools/absent.sh >&2
fi
export DEBIAN_FRONTEND=noninteractive
timeout 300 apt-get -qq update >&2
for package in $missing; do
    timeout 300 apt-get -qq install --no-install-recommends "$package" >/dev/null ||
        echo "$package could not be installed; tests of it will be skipped." >&2
done
exit 0
