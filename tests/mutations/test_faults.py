"""The faults of the mutation check are what they say: see `check`."""

import pytest

from tests.mutations.fault import ROOT
from tests.mutations.faults import FAULTS


def test_there_are_enough_of_every_part():
    files = {fault.file.split("/")[0] for fault in FAULTS}
    assert len(FAULTS) >= 60
    assert {"losses", "sampler", "data", "rollout", "programs", "learner"} <= files
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_of_a_program(fault):
    compile(fault.source(), fault.file, "exec")
    for file in fault.tests.split():
        assert (ROOT / "tests" / file).exists()
