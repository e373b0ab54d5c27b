"""The version of each batch that is sampled, in turns or while steps train."""

import random
import threading
import time

import pytest

from jaxrl_post.rollout import ahead as ahead_module
from jaxrl_post.rollout.ahead import Ahead, SampledBatch
from jaxrl_post.rollout.episode import Group


class Version:
    """Stands for a sampler with the parameters of a step's beginning."""

    def __init__(self, version: int) -> None:
        self.version = version


class Work:
    """Samples batches: the group of step t has the prompt id t."""

    def __init__(self, seconds=lambda number: 0.0) -> None:
        self.sampled: list[tuple[int, int]] = []
        self.seconds = seconds

    def __call__(self, version: Version, number: int) -> SampledBatch:
        self.sampled.append((number, version.version))
        time.sleep(self.seconds(number))
        return SampledBatch([Group(number, ())], {"version": float(version.version)})


def train(ahead: Ahead, steps: range, seconds=lambda number: 0.0) -> list[int]:
    """Takes steps; returns the prompt ids that were trained on."""
    trained = []
    for number in steps:
        ahead.feed(None, Version(number), number)
        trained += [group.prompt_id for group in ahead.take()]
        time.sleep(seconds(number))
    return trained


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_each_batch_is_sampled_by_the_version_of_its_index(lag, beside):
    work = Work()
    ahead = Ahead(work, lag, 7, beside)
    assert train(ahead, range(1, 8)) == [1, 2, 3, 4, 5, 6, 7]
    assert work.sampled == [(t, max(1, t - lag)) for t in range(1, 8)]
    ahead.close()


def test_random_speeds_change_no_version():
    for seed in range(40):
        rng = random.Random(seed)
        lag, steps = rng.randrange(4), rng.randrange(1, 8)
        work = Work(lambda _, rng=rng: rng.choice([0, 0, 0.002]))
        ahead = Ahead(work, lag, steps, beside=True)
        every = range(1, steps + 1)
        pause = random.Random(-seed)
        trained = train(ahead, every, lambda _, p=pause: p.choice([0, 0, 0.002]))
        assert trained == [*every]
        assert work.sampled == [(t, max(1, t - lag)) for t in every]
        ahead.close()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("stop", range(7))
def test_a_resumed_run_trains_on_the_same_batches(lag, stop, beside):
    first, second = Work(), Work()
    ahead = Ahead(first, lag, 7, beside)
    trained = train(ahead, range(1, stop + 1))
    ahead.settle()
    saved = ahead.state()
    ahead.close()
    # The batches that wait are of versions that no checkpoint holds.
    assert [each["step"] for each in saved] == [t for t, _ in first.sampled][stop:]
    again = Ahead(second, lag, 7, beside)
    again.restore(saved)
    trained += train(again, range(stop + 1, 8))
    again.close()
    assert trained == [1, 2, 3, 4, 5, 6, 7]
    assert first.sampled + second.sampled == [(t, max(1, t - lag)) for t in range(1, 8)]


def test_the_next_batch_is_sampled_while_a_step_trains():
    began, trained = threading.Event(), threading.Event()

    def sample(version: Version, number: int) -> SampledBatch:
        if number == 2:
            began.set()
            assert trained.wait(30)
        return SampledBatch([Group(number, ())], {})

    ahead = Ahead(sample, 1, 3, beside=True)
    ahead.feed(None, Version(1), 1)
    assert began.wait(30)  # The step has its batch, and trains.
    assert [group.prompt_id for group in ahead.take()] == [1]
    trained.set()
    ahead.feed(None, Version(2), 2)
    ahead.close()


def test_shares_of_waiting(monkeypatch):
    """The clock of this test advances by 10 s while a batch is sampled."""
    now = [0.0]
    monkeypatch.setattr(ahead_module.time, "perf_counter", lambda: now[0])

    def sample(version: Version, number: int) -> SampledBatch:
        now[0] += 10.0
        return SampledBatch([], {})

    ahead = Ahead(sample, 0, 9, beside=True)
    assert ahead.feed(None, Version(1), 1) == {}
    for number, seconds in ((2, 5.0), (3, 30.0)):
        now[0] += seconds
        idle = ahead.feed(None, Version(number), number)
        whole = seconds + 10.0
        assert idle["idle/trainer"] == pytest.approx(10.0 / whole)
        assert idle["idle/samplers"] == pytest.approx(seconds / whole)
    ahead.close()


@pytest.mark.parametrize("beside", [False, True])
def test_an_error_of_sampling_ends_the_step_that_needs_the_batch(beside):
    def sample(version: Version, number: int) -> SampledBatch:
        if number == 3:
            raise ValueError("broken")
        return SampledBatch([Group(number, ())], {})

    ahead = Ahead(sample, 0, 5, beside)
    assert train(ahead, range(1, 3)) == [1, 2]
    with pytest.raises(ValueError, match="broken"):
        ahead.feed(None, Version(3), 3)
    ahead.close()


def test_a_checkpoint_does_not_hide_an_error_of_a_later_batch():
    def sample(version: Version, number: int) -> SampledBatch:
        if number == 2:
            raise ValueError("broken")
        return SampledBatch([], {})

    ahead = Ahead(sample, 1, 5, beside=True)
    ahead.feed(None, Version(1), 1)
    with pytest.raises(ValueError, match="broken"):
        ahead.settle()
    ahead.close()


def test_a_longer_run_goes_on_from_the_last_version():
    ahead = Ahead(Work(), 2, 3)
    train(ahead, range(1, 4))
    longer = Ahead(work := Work(), 2, 6)
    longer.restore(ahead.state())
    assert train(longer, range(4, 7)) == [4, 5, 6]
    assert work.sampled == [(4, 4), (5, 4), (6, 4)]
