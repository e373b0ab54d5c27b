"""A sampler of several processes: all take the same ticks."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_post.fleet import lockstep
from jaxrl_post.fleet.lockstep import Tick, together
from jaxrl_post.fleet.orders import Grant, PolicyVersion, Revoke
from jaxrl_post.sampler import Request, SamplingParams
from tests.e2e.fleets import free_port
from tests.fleet.sockets import PATIENCE_S, Sampler, Trainer, alone, same

POLICY = PolicyVersion(3, "ab12")
SAMPLING = SamplingParams(max_tokens=12, stop_ids=(3,))


class World:
    """Threads in place of processes, each of which may exchange values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self._thread = threading.local()
        self._values: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=PATIENCE_S)
        processes = SimpleNamespace(
            index=lambda: self._thread.index, exchange=self._exchange
        )
        monkeypatch.setattr(lockstep, "processes", processes)

    def of(self, index: int) -> Callable[[Tick], Tick]:
        """`together` of a process."""

        def found(tick: Tick) -> Tick:
            self._thread.index = index
            return together(tick)

        return found

    def _exchange(self, name: str, value: Any) -> list[Any]:
        assert name == "tick"
        self._values[self._thread.index] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


def all_of(world: World, given: list[Tick]) -> list[Tick]:
    """The ticks that the processes take together."""
    found: list[Any] = [None] * len(given)

    def take(index: int) -> None:
        found[index] = world.of(index)(given[index])

    threads = [
        threading.Thread(target=take, args=(index,)) for index in range(len(given))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    return found


def test_events_are_those_of_process_0_and_versions_those_of_all(monkeypatch):
    grant = Grant(7, POLICY, 2, Request(5, tuple(range(90)), 4, sampling=SAMPLING))
    events = (grant, Revoke(7, (1, 3)), None, (POLICY, PolicyVersion(4, "cd")), ())
    first = Tick(events, (("ab", 0), ("cd", 1), ("ef", 0)), stop=False)
    other = Tick((), (("ef", 0), ("cd", 1), ("ab", 1)), stop=False)
    found = all_of(World(monkeypatch, 3), [first, other, first])
    # In process 0's order; "ab" is fetched for another attempt.
    assert found == [Tick(events, (("cd", 1), ("ef", 0)), stop=False)] * 3


@pytest.mark.parametrize("index", [0, 1])
def test_any_process_ends_all(monkeypatch, index):
    given = [Tick((), (), stop=number == index) for number in range(2)]
    assert all(tick.stop for tick in all_of(World(monkeypatch, 2), given))


def test_processes_sample_the_same_by_the_parameters_of_process_0(monkeypatch):
    """Each has an engine here, in place of its part of the one of all."""
    world, trainer = World(monkeypatch, 2), Trainer(free_port(), silence_s=10.0)
    first = Sampler("s0", trainer.url, together=world.of(0))
    other = Sampler("s0", first.relay, together=world.of(1), leads=False)
    told = list[Any]()
    step = other.follower._worker.step
    other.follower._worker.step = lambda: told.extend(found := step()) or found
    try:
        for version in range(3):
            asked = [
                Request(10 * version + i, (i + 5, 7, 9), 4, sampling=SAMPLING)
                for i in range(3)
            ]
            samplers = trainer.publish(version, version)
            found = trainer.sample(samplers, asked)
            expected = alone(version, version, asked)
            assert len(found) == len(expected)
            assert all(map(same, found, expected))
            # The other process has drawn the same tokens.
            drawn = np.concatenate([each.tokens.ids for each in told])
            assert sorted(drawn) == sorted(
                np.concatenate([each.tokens.ids for each in expected])
            )
            told.clear()
    finally:
        trainer.close("the run is complete")
        first.close()
        other.close()
    assert (first.error, other.error) == (None, None)
    # It asked the trainer for nothing.
    assert [each.name for each in trainer.hub.leases.members.values()] in ([], ["s0"])
