#!/bin/sh
# Tells which programs are not here that tests skip without, and what brings them: a line
# each, or nothing. Installs nothing, and never fails.
set -u
as_root=
[ "$(id -u)" -eq 0 ] || as_root="sudo "
install="install, with the system's package manager,"
for manager in apt-get dnf zypper; do
    if command -v "$manager" >/dev/null 2>&1; then
        install="$as_root$manager install"
        break
    fi
done

# absent PROGRAM PACKAGE USE [COMMAND]
absent() {
    command -v "$1" >/dev/null 2>&1 ||
        echo "Not here: $1, for $3; its tests are skipped. To have it: ${4:-$install $2}"
}

absent bwrap bubblewrap "the default sandbox"
if command -v bwrap >/dev/null 2>&1 &&
    ! bwrap --unshare-pid --unshare-net --ro-bind / / true >/dev/null 2>&1; then
    remedy="run the container with rights to make namespaces, as docker run --privileged"
    for name in apparmor_restrict_unprivileged_userns=0 unprivileged_userns_clone=1; do
        file=/proc/sys/kernel/${name%=*}
        if [ -r "$file" ] && [ "$(cat "$file")" != "${name#*=}" ]; then
            remedy="${as_root}sysctl -w kernel.$name"
        fi
    done
    echo "bwrap is here, but may make no namespaces: tests of the default sandbox are" \
        "skipped. To allow it: $remedy"
fi
runsc=
command -v apt-get >/dev/null 2>&1 || runsc="see https://gvisor.dev/docs/user_guide/install"
absent runsc runsc "the sandbox of gVisor" "$runsc"
absent chromium chromium "drawing the report"
absent unshare util-linux "a sandbox of an ordinary user"
absent setpriv util-linux "a sandbox of an ordinary user"
exit 0
