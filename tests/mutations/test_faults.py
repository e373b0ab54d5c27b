"""The faults of the mutation check are what they say: see `check`."""

import ast
import dataclasses
import textwrap

import pytest

from tests.mutations import syntax
from tests.mutations.fault import ROOT
from tests.mutations.faults import FAULTS


def test_there_are_enough_of_every_part():
    files = {fault.file.split("/")[0] for fault in FAULTS}
    assert len(FAULTS) >= 300
    assert {"losses", "sampler", "data", "rollout", "programs", "learner"} <= files
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_of_a_program(fault):
    compile(fault.source(), fault.file, "exec")
    for file in fault.tests.split():
        assert (ROOT / "tests" / file).exists()


def test_a_fault_whose_place_has_moved_says_where_it_is():
    place = "losses/kl.py::k2"
    [fault] = [fault for fault in FAULTS if fault.name == "k2 lacks its half"]
    assert fault.place == place
    moved = dataclasses.replace(fault, place="losses/policy.py::clipped_surrogate")
    with pytest.raises(ValueError, match=rf"occurs 0 times; it occurs in: {place}\."):
        moved.source()
    gone = dataclasses.replace(fault, place="losses/gone.py::k2", before="no * where")
    with pytest.raises(ValueError, match=r"occurs 0 times; it occurs in: no file\."):
        gone.source()


PROGRAM = textwrap.dedent(
    '''
    def other(a, b):
        return max(a, b)  # ä

    class Class:
        def method(self, a, b):
            """Says ä."""
            if a:
                found = max(
                    a,  # the first
                    b,
                )
                return found
            return max(b, a)
    '''
)


@pytest.mark.parametrize(
    ("function", "before", "after", "expected"),
    [
        ("Class.method", "max(a, b)", "a + b", "found = (a + b)\n"),
        ("Class", "max(b, __)", "__", "return (a)\n"),
        ("Class.method", "max(a, __)", "min(__, a)", "found = (min(b, a))\n"),
        (
            "other",
            "return __",
            "b = 0\nreturn __",
            "    b = 0\n    return max(a, b)  #",
        ),
        (
            "",
            "if a:\n    __",
            "if b:\n    __",
            "        if b:\n            found = max",
        ),
        ("", "found = __\nreturn found", "pass", "        if a:\n            pass\n"),
    ],
)
def test_a_place_is_found_however_it_is_written(function, before, after, expected):
    changed = syntax.replaced(PROGRAM, function, before, after)
    ast.parse(changed)
    assert expected in changed
    # As much else as there was.
    assert changed.count("ä") == 2


def test_a_pattern_that_fits_twice_is_counted_twice():
    tree = ast.parse(PROGRAM)
    assert syntax.count(tree, "", "max(__, b)") == 2
    assert syntax.functions_with(tree, "max(__, b)") == ["other", "Class.method"]
    assert syntax.count(tree, "other", "max(__, b)") == 1
    assert syntax.count(tree, "Class.other", "max(__, b)") == 0
