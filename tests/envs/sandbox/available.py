"""Sandboxes that this machine must have; a test of another one is skipped."""

import subprocess

import pytest

from jaxrl_post.envs.sandbox import SandboxError, find
from jaxrl_post.envs.sandbox.mechanisms import MECHANISMS

_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork")


def require(name: str) -> str:
    """The requirement that names a mechanism, for `find`.

    Skips the test where the mechanism is not installed, or the machine makes no
    namespaces. Where both are there, a sandbox that does not start fails the test.
    """
    if name == "unsafe":
        return name
    (mechanism,) = (one for one in MECHANISMS if one.name == name)
    reason = mechanism.unavailable()
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    requirement = f"require:{name}"
    try:
        find(requirement).close()
    except SandboxError as error:
        if name != "landlock" and _makes_no_namespaces():
            pytest.skip(f"no namespaces can be made here: {error}")
        raise
    return requirement


def _makes_no_namespaces() -> bool:
    try:
        made = subprocess.run(
            [*_NAMESPACES, "true"], capture_output=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return True
    return made.returncode != 0
