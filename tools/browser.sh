#!/bin/sh
# Installs Chromium, in which tests open pages, where root can have it from Debian's
# packages. Elsewhere these tests are skipped.
set -u

command -v chromium >/dev/null 2>&1 && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "no chromium: tests in a browser will be skipped." >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
timeout 300 apt-get -qq update >&2
timeout 600 apt-get -qq install --no-install-recommends chromium >/dev/null 2>&1 ||
    echo "chromium could not be installed; tests in a browser will be skipped." >&2
exit 0
