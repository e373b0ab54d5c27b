"""Ordinary programs print in a sandbox what they print outside of it."""

import pytest

from jaxrl_post.envs.sandbox import Limits, find
from tests.envs.sandbox import available, ordinary

# Nothing ends by its time: a machine may be slow.
LIMITS = Limits(wall_seconds=300, cpu_seconds=300)
WAYS = ["bubblewrap", "landlock", "gvisor"]
pytestmark = pytest.mark.processes


def printed(requirement):
    """End and output of each program, all in one place."""
    with find(requirement, limits=LIMITS) as sandbox, sandbox.open() as place:
        return {
            name: place.python(program) for name, program in ordinary.PROGRAMS.items()
        }


@pytest.fixture(scope="module")
def outside():
    found = printed("unsafe")
    assert {name: each.stderr for name, each in found.items() if each.status} == {}
    assert all(each.stdout for each in found.values())
    return {name: each.stdout for name, each in found.items()}


@pytest.mark.parametrize("way", WAYS)
def test_ordinary_programs_print_the_same(way, outside):
    found = printed(available.require(way))
    assert {
        name: (each.stdout, each.stderr, each.status) for name, each in found.items()
    } == {name: (text, "", 0) for name, text in outside.items()}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused_says_so(way):
    requirement = available.require(way)
    with find(requirement, limits=LIMITS) as sandbox, sandbox.open() as place:
        for name, (program, error) in ordinary.REFUSED.items():
            outcome = place.python(program)
            assert (outcome.ended, outcome.status) == ("exit", 1), (name, outcome)
            assert error in outcome.stderr.splitlines()[-1], (name, outcome.stderr)
