"""Set-up says which programs are not here that tests skip without."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ABSENT = Path(__file__).parents[2] / "tools" / "absent.sh"
PROGRAMS = {
    "bwrap": "bubblewrap",
    "runsc": "runsc",
    "chromium": "chromium",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}


def told(folder: Path, **programs: str) -> list[str]:
    """Output on a machine with only these programs, each a shell script."""
    needed = {name: f'exec {shutil.which(name)} "$@"' for name in ("sh", "id", "cat")}
    for name, script in (needed | programs).items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    ran = subprocess.run(
        ["/bin/sh", str(ABSENT)],
        env=os.environ | {"PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


@pytest.mark.parametrize("manager", ["apt-get", "dnf", "zypper"])
def test_each_program_has_a_line_with_the_command_that_brings_it(tmp_path, manager):
    lines = told(tmp_path, **{manager: ""})
    assert len(lines) == len(PROGRAMS)
    for line, (program, package) in zip(lines, PROGRAMS.items(), strict=True):
        assert line.startswith(f"Not here: {program}, for ")
        # Only Debian and Ubuntu have a package of gVisor.
        if program == "runsc" and manager != "apt-get":
            assert line.endswith("see https://gvisor.dev/docs/user_guide/install")
        else:
            assert line.endswith(f"{manager} install {package}")


def test_an_unknown_machine_is_told_as_well(tmp_path):
    assert len(told(tmp_path)) == len(PROGRAMS)


def test_nothing_is_said_where_all_is_there(tmp_path):
    assert told(tmp_path, **dict.fromkeys(PROGRAMS, "exit 0")) == []


def test_a_sandbox_that_may_make_no_namespaces_is_told(tmp_path):
    there = dict.fromkeys(PROGRAMS, "exit 0") | {"bwrap": "exit 1"}
    [line] = told(tmp_path, **there)
    assert line.startswith("bwrap is here, but may make no namespaces: ")
    assert "To allow it: " in line
