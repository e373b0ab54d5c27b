"""The order of tasks: whole epochs, and a position that can be saved."""

import itertools
import json

import pytest

from jaxrl_post.data.prompts import task_indices


def take(iterator, count):
    return [int(index) for index in itertools.islice(iterator, count)]


def test_every_epoch_draws_every_task_once_in_an_order_of_its_own():
    drawn = take(task_indices(10, seed=0), 50)
    epochs = [tuple(drawn[i : i + 10]) for i in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 5


def test_the_order_is_the_seeds():
    assert take(task_indices(10, seed=1), 20) == take(task_indices(10, seed=1), 20)
    assert take(task_indices(10, seed=1), 20) != take(task_indices(10, seed=2), 20)


@pytest.mark.parametrize("before", [0, 7, 10, 23])
def test_a_resumed_iterator_draws_what_the_first_would_have(before):
    first = task_indices(10, seed=3)
    take(first, before)
    state = json.loads(json.dumps(first.get_state()))  # as a checkpoint keeps it
    expected = take(first, 25)
    second = task_indices(10, seed=3)
    take(second, 4)
    second.set_state(state)
    assert take(second, 25) == expected


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="the data set is empty; got 0 tasks"):
        task_indices(0, seed=0)
