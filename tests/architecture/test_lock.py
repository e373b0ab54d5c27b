"""requirements.lock pins what pyproject.toml asks for, and names no place."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [
    line
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if line and not line.startswith("#")
]
LOCKED_EXTRAS = (
    "math",
    "envs",
    "schema",
    "parquet",
    "hub",
    "gguf",
    "pictures",
    "ray",
    "serve",
    "tools",
    "openenv",
    "notebooks",
    "docs",
    "dev",
)


def test_every_line_is_a_name_and_a_version():
    assert len(LINES) > 50
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.+!]+( ; [^/@]+)?", line), line


@pytest.mark.parametrize("extra", ["core", *LOCKED_EXTRAS])
def test_what_is_asked_for_is_pinned(extra):
    wanted = (
        PROJECT["dependencies"]
        if extra == "core"
        else PROJECT["optional-dependencies"][extra]
    )
    pinned = {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in map(Requirement, LINES)
    }
    assert wanted
    for requirement in map(Requirement, wanted):
        (version,) = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version.version), requirement


def test_make_installs_what_is_pinned():
    makefile = (ROOT / "Makefile").read_text()
    assert f"EXTRAS := {','.join(LOCKED_EXTRAS)}\n" in makefile
    lock = (ROOT / "tools" / "lock.sh").read_text()
    assert re.findall(r"--extra (\w+)", lock) == list(LOCKED_EXTRAS)
