"""A worker that is lost with its machine costs nothing, and nothing counts twice."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from jaxrl_post.envs import Judgement, Message, Step, Task, WorkerPool
from jaxrl_post.envs.tasks.nim import Nim
from jaxrl_post.envs.workers.interface import WorkerLostError, WorkerSettings

PATIENCE_S = 60.0
TASK = Task(0, (), "")


class Mortal:
    """A worker without a process, whose machine is lost in the middle of a request.

    Args:
        losses: how often it is lost before it answers.
        rooms: how often it finds a machine; None for always.
    """

    def __init__(self, losses: int, rooms: int | None = None) -> None:
        self.losses, self.rooms = losses, rooms
        self.alive = False
        self.start_limit_s = 1.0
        self.asked = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.refused = threading.Event()

    def start(self) -> None:
        if self.rooms == 0:
            self.refused.set()
            raise WorkerLostError("no node has room")
        if self.rooms is not None:
            self.rooms -= 1
        self.alive = True

    def ask(self, request: bytes, calls: int = 1) -> Judgement:
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        if self.losses:
            self.losses -= 1
            self.alive = False
            raise WorkerLostError("the node died")
        return Judgement(Step(float(calls), done=True), None, "ok", 0.0)

    def end(self, *, grace_s: float = 0.0) -> None:
        self.alive = False

    def kill(self) -> None:
        self.go.set()


@pytest.fixture
def pool_of(scripted):
    """Makes a pool of such workers; closes it."""
    opened = []

    def make(*workers: Mortal, environment: Any = None, **options: Any) -> WorkerPool:
        waiting = iter(workers)

        def make_worker(settings: WorkerSettings) -> Mortal:
            return next(waiting)

        environment = environment or scripted.Scripted()
        pool = WorkerPool(environment, len(workers), make_worker=make_worker, **options)
        opened.append(pool)
        return pool

    yield make
    for pool in opened:
        pool.close()


def submit(pool: WorkerPool, session: object = None) -> Future[Judgement]:
    return pool.submit(TASK, (Message("assistant", "talk"),), session)


def test_another_worker_answers(pool_of):
    pool = pool_of(Mortal(losses=1), Mortal(losses=1))
    kinds = [submit(pool).result(PATIENCE_S).kind for _ in range(10)]
    assert kinds == ["ok"] * 10


def test_a_request_that_loses_three_workers_fails(pool_of):
    pool = pool_of(Mortal(losses=3))
    outcome = submit(pool).result(PATIENCE_S)
    assert outcome.kind == "unreachable"
    assert outcome.error == "it lost 3 workers, the last one so: the node died"
    assert submit(pool).result(PATIENCE_S).kind == "ok"


def test_an_agent_is_not_run_again(pool_of):
    """Its episode has recorded what the lost one was served."""
    pool = pool_of(Mortal(losses=1), environment=Nim())
    outcome = submit(pool, (0, 0)).result(PATIENCE_S)
    assert outcome.kind == "unreachable"
    assert outcome.error == "it lost its worker: the node died"
    assert submit(pool, (0, 1)).result(PATIENCE_S).kind == "ok"


def test_losses_do_not_count_as_crashes(pool_of):
    pool = pool_of(Mortal(losses=2), max_crashes_per_minute=1)
    assert submit(pool).result(PATIENCE_S).kind == "ok"


def test_a_session_goes_on_in_another_worker(pool_of, scripted):
    pool = pool_of(Mortal(losses=1), environment=scripted.Counter())
    outcome = submit(pool, "one").result(PATIENCE_S)
    # Opening the session again, and one turn.
    assert (outcome.kind, outcome.step.reward) == ("ok", 2.0)


def test_the_end_of_a_session_is_not_sent_to_another_worker(pool_of, scripted):
    worker = Mortal(losses=0)
    pool = pool_of(worker, environment=scripted.Counter())
    assert submit(pool, "one").result(PATIENCE_S).kind == "ok"
    worker.asked.clear()
    worker.losses = 1
    pool.end("one")
    assert worker.asked.wait(PATIENCE_S)
    assert submit(pool, "two").result(PATIENCE_S).kind == "ok"


def test_a_pool_without_room_says_so(pool_of):
    pool = pool_of(Mortal(losses=1, rooms=1), start_timeout_s=0.2)
    outcome = submit(pool).result(PATIENCE_S)
    assert outcome.kind == "unreachable"
    assert outcome.error == "no worker is left: no node has room"


def test_a_pool_that_finds_no_room_does_not_open(pool_of):
    with pytest.raises(WorkerLostError, match="no node has room"):
        pool_of(Mortal(losses=0), Mortal(losses=0, rooms=0))


def test_a_worker_lost_while_the_pool_closes_resolves_its_request(pool_of):
    worker = Mortal(losses=1)
    worker.go.clear()
    pool = pool_of(worker)
    future = submit(pool)
    assert worker.asked.wait(PATIENCE_S)
    pool.close(deadline_s=0.0)
    outcome = future.result(timeout=0.0)
    error = "the worker pool was closed, and the worker was lost: the node died"
    assert (outcome.kind, outcome.error) == ("crashed", error)


def test_a_request_that_waits_for_another_worker_is_resolved_on_closing(pool_of):
    worker = Mortal(losses=1, rooms=1)
    pool = pool_of(worker)
    future = submit(pool)
    # The start time-out, after which the request would fail, is 60 s.
    assert worker.refused.wait(PATIENCE_S)
    assert future.running()
    pool.close(deadline_s=0.0)
    outcome = future.result(timeout=0.0)
    assert (outcome.kind, outcome.error) == ("crashed", "the worker pool was closed")
