"""Workers on the nodes of a Ray cluster: nodes die, and nothing is lost."""

import collections
import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from jaxrl_post.envs import Judgement, Message, Task, WorkerPool
from jaxrl_post.envs.workers.hosts import open_hosts
from jaxrl_post.envs.workers.interface import WorkerLostError
from jaxrl_post.envs.workers.ray_worker import RayCluster
from tests.envs.processes import PATIENCE_S, ends_within, needs_proc, run_program
from tests.envs.scripted_environments import COUNT, said

pytestmark = pytest.mark.processes

START_S = 120.0


class Nodes:
    """The program `ray_nodes`: a cluster of two nodes of two CPUs each."""

    def __init__(self, directory: Path) -> None:
        program = Path(__file__).with_name("ray_nodes.py")
        self._log = (directory / "ray_nodes.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.address = ""

    def wait_for_address(self) -> None:
        self.address = self._line()

    def tell(self, command: str) -> None:
        """Has the program kill or add a node, and waits until it has."""
        _opened(self._process.stdin).write(f"{command}\n")
        _opened(self._process.stdin).flush()
        assert self._line() == "done"

    def close(self) -> None:
        _opened(self._process.stdin).close()
        try:
            self._process.wait(timeout=PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait(timeout=PATIENCE_S)
            _opened(self._process.stdout).close()
            self._log.close()

    def _line(self) -> str:
        line = _opened(self._process.stdout).readline().strip()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"ray_nodes has ended: {self._log.read()[-4000:]}")
        return line


def _opened(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture(scope="module")
def nodes(ray_token, tmp_path_factory) -> Iterator[Nodes]:
    """Two nodes; a test that kills one adds another."""
    nodes = Nodes(tmp_path_factory.mktemp("ray"))
    with contextlib.closing(nodes):
        nodes.wait_for_address()
        yield nodes


def judge(pool: WorkerPool, count: int, at: int, do) -> list[Judgement]:
    """Has `count` answers judged; calls `do` when `at` of them are."""
    resolved = collections.Counter()
    futures = []
    for number in range(count):
        turn = Message("assistant", f"echo|{number}")
        future = pool.submit(Task(number, (), ""), (turn,))
        future.add_done_callback(lambda _, number=number: resolved.update([number]))
        futures.append(future)
    futures[at].result(timeout=START_S)
    do()
    outcomes = [future.result(timeout=START_S) for future in futures]
    assert resolved == collections.Counter(range(count)), "each was resolved once"
    assert [outcome.error for outcome in outcomes] == [None] * count
    assert [outcome.step.reward for outcome in outcomes] == [*map(float, range(count))]
    return outcomes


def used(outcomes: list[Judgement]) -> set[float]:
    """The nodes that judged."""
    return {outcome.step.metrics["node"] for outcome in outcomes}


def check_that_a_node_may_die(nodes: Nodes, scripted, count: int) -> None:
    with (
        open_hosts(f"ray:{nodes.address}") as make_worker,
        WorkerPool(scripted.Scripted(), 4, make_worker=make_worker) as pool,
    ):
        outcomes = judge(pool, count, count // 2, lambda: nodes.tell("kill"))
        assert len(used(outcomes[: count // 2])) == 2
        assert len(used(outcomes)) == 2
        # The lost workers are started on a new node.
        nodes.tell("add")
        expires = time.monotonic() + START_S
        while len(used(judge(pool, 100, 0, lambda: None))) == 1:
            assert time.monotonic() < expires


# `test_a_connection_that_dies_is_made_anew` guards the same on one node.
@pytest.mark.all
@pytest.mark.slow("starts a cluster and another node")
def test_a_node_may_die(nodes, scripted):
    check_that_a_node_may_die(nodes, scripted, 300)


# The test above is the cheaper guard.
@pytest.mark.all
def test_a_node_may_die_under_ten_thousand_judgements(nodes, scripted):
    check_that_a_node_may_die(nodes, scripted, 10_000)


@pytest.mark.all  # test_a_node_may_die kills a node too.
@pytest.mark.slow("starts another node of a cluster")
def test_sessions_go_on_when_their_node_dies(nodes, scripted):
    sessions = [f"s{number}" for number in range(8)]
    with (
        open_hosts(f"ray:{nodes.address}") as make_worker,
        WorkerPool(scripted.Counter(), 4, make_worker=make_worker) as pool,
    ):

        def take(*turns: str) -> list[Judgement]:
            asked = [pool.submit(COUNT, said(*turns), session) for session in sessions]
            outcomes = [future.result(timeout=START_S) for future in asked]
            answers = {outcome.step.messages[0].content for outcome in outcomes}
            assert answers == {str(len(turns))}
            return outcomes

        assert len(used(take("slow"))) == 2
        nodes.tell("kill")
        # The node's processes may answer for another second.
        turns, expires = ["slow", "b"], time.monotonic() + START_S
        while len(used(take(*turns))) == 2:
            assert time.monotonic() < expires
            turns.append("b")
        nodes.tell("add")


def test_a_connection_that_dies_is_made_anew(nodes, scripted):
    with (
        RayCluster(nodes.address) as cluster,
        WorkerPool(scripted.Scripted(), 2, make_worker=cluster.worker) as pool,
    ):
        killed = cluster._driver
        judge(pool, 20, 10, killed.kill)
        # All may have been judged before: then no new one was needed.
        killed._process.wait(timeout=START_S)
        judge(pool, 2, 0, lambda: None)
        assert cluster._driver is not killed


@pytest.mark.slow("waits ten seconds for CPUs that are not there")
def test_too_few_cpus_are_an_error_that_counts_them(nodes, scripted):
    cluster = RayCluster(nodes.address, cpus_per_worker=3, timeout_s=10)
    with cluster, pytest.raises(WorkerLostError) as raised:
        WorkerPool(scripted.Scripted(), make_worker=cluster.worker)
    # The cluster's counts are a few seconds old.
    assert re.search(
        r"no node had 3 CPUs free for a worker within 10 s: the cluster has \d CPUs, "
        r"\d of them free\. Ask for fewer workers, or for fewer CPUs for each",
        str(raised.value),
    )


def test_a_cluster_that_is_not_there_is_named(ray_token):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hosts = open_hosts(f"ray:127.0.0.1:{port}")
    with pytest.raises(WorkerLostError) as raised, hosts:
        pass
    assert f"no Ray cluster answers at 127.0.0.1:{port} " in str(raised.value)
    assert f"`ray start --address 127.0.0.1:{port} " in str(raised.value)


def test_what_is_no_cluster_is_given_up(ray_token):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        cluster = RayCluster(address, timeout_s=3)
        with pytest.raises(WorkerLostError) as raised, cluster:
            pass
    assert f"the Ray cluster {address} cannot be used: no answer" in str(raised.value)


def test_a_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(WorkerLostError, match=r"pip install -e '.*\[ray\]'"),
        RayCluster("local"),
    ):
        pass


@needs_proc
def test_a_local_cluster_ends_with_its_caller(ray_token, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from scripted_environments import Scripted\n"
        "from jaxrl_post.envs import Message, Task, WorkerPool\n"
        "from jaxrl_post.envs.workers.hosts import open_hosts\n"
        "with open_hosts('ray:local', 0.01) as make_worker:\n"
        "    pool = WorkerPool(Scripted(), make_worker=make_worker)\n"
        "    for script in ('pid', 'echo|0'):\n"
        "        turn = (Message('assistant', script),)\n"
        "        outcome = pool.submit(Task(0, (), ''), turn).result(timeout=60)\n"
        "        print(*map(int, outcome.step.metrics.values()), flush=True)\n"
        "    assert 'ray' not in sys.modules\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = run_program(program)
    assert (ran.returncode, ran.stderr) == (-signal.SIGKILL, "")
    worker, raylet = map(int, ran.stdout.split())
    assert worker != raylet
    assert ends_within(worker, PATIENCE_S)
    assert ends_within(raylet, PATIENCE_S)
