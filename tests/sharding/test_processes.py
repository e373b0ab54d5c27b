"""Finding the processes of a run: from options, or from what started them."""

import pytest

from jaxrl_post.sharding import processes
from jaxrl_post.sharding.processes import Processes, ProcessesError, find

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-010]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}


def test_a_program_of_one_process_starts_nothing():
    assert find() is None
    assert find(count=1) is None
    with processes.started(None, lambda *why: None) as remarks:
        assert remarks == []
        assert (processes.index(), processes.count()) == (0, 1)
        assert processes.exchange("anything", {"a": 1}) == [{"a": 1}]
        assert processes.agree("anything", 2) == 2
        processes.check_equal("anything", {"a": object})


def test_options_name_the_processes():
    found = find("host-0:4000", 4, 3)
    assert found == Processes("host-0:4000", 4, 3)
    assert found.address == ("host-0", 4000)


def test_slurm_names_them(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    # The job's number makes the port: 4097 % 4096 above 65536 - 4096.
    assert find() == Processes("node007:61441", 4, 2, (0,))
    # One process a host drives all of the host's devices.
    assert find(whole_host=True) == Processes("node007:61441", 4, 2, None)
    # An option has precedence.
    assert find("node007:4000") == Processes("node007:4000", 4, 2, (0,))


def test_one_task_of_slurm_is_one_process(monkeypatch):
    for name, value in (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    assert find() is None


def test_open_mpi_names_them(monkeypatch):
    for name, value in {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    found = find()
    assert (found.count, found.index, found.address[0]) == (2, 1, "10.96.0.1")


def test_an_environment_that_cannot_be_read_is_named(monkeypatch):
    for name, value in (SLURM | {"SLURM_NTASKS": "four"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ProcessesError, match=r"cannot be read \(ValueError: .*'four'\); give --process"
    ):
        find()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, 0), "--processes.coordinator: is missing"),
        (("a:1", None, 0), "--processes.count: is missing"),
        (("a:1", 2, None), "--processes.index: is missing; a run of several processes"),
        (("a:1", 2, 2), "--processes.index: must be 0 to 1 for 2 processes; got 2"),
        (("a:1", 2, -1), "--processes.index: must be 0 to 1 for 2 processes; got -1"),
        (("a", 2, 0), "--processes.coordinator: must be HOST:PORT .*; got 'a'"),
        (("a:0", 2, 0), "--processes.coordinator: must be HOST:PORT .*; got 'a:0'"),
        ((":4000", 2, 0), "--processes.coordinator: must be HOST:PORT"),
        (("a:70000", 2, 0), "--processes.coordinator: must be HOST:PORT"),
    ],
)
def test_what_is_missing_or_wrong_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        find(*given)


def test_the_first_difference_is_named():
    ours = {"--seed": "0", "loss": "NaN", "--mesh": '"dp8"'}
    assert processes._difference([ours, dict(ours), dict(ours)]) is None
    assert processes._difference([ours, dict(ours), ours | {"--mesh": '"tp8"'}]) == (
        'process 2 differs from process 0 in --mesh: "tp8" there, "dp8" in process 0'
    )
    more = ours | {"the version of ray": '"2.60"'}
    assert processes._difference([ours, more]) == (
        'process 1 differs from process 0 in the version of ray: "2.60" there, None in '
        "process 0"
    )


def test_clocks_that_differ_by_minutes_are_remarked():
    [remark] = processes._clock_remarks({1: 0.4, 2: -130.2, 3: 59.0})
    assert remark.startswith("the clock of process 2 is 130 s behind")
