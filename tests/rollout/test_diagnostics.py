"""Distributions of a step's advantages and values."""

import json

import numpy as np
import pytest

from jaxrl_post.rollout.diagnostics import BINS, PLACES, diagnostics
from jaxrl_post.types import TokenBatch


def batch(ends, mask, advantages, positions=None, **more):
    length = len(ends)
    positions = np.arange(length) if positions is None else positions
    arrays = {name: np.array([each], np.float32) for name, each in more.items()}
    return TokenBatch(
        tokens=np.zeros((1, length), np.int32),
        positions=np.array([positions], np.int32),
        ends=np.array([ends], np.int32),
        loss_mask=np.array([mask], bool),
        advantages=np.array([advantages], np.float32),
        behavior_logprobs=np.zeros((1, length), np.float32),
        versions=np.zeros((1, length), np.int32),
        **arrays,
    )


def test_trained_tokens_alone_are_counted():
    found = diagnostics([batch([3, 3, 3, 0], [0, 1, 1, 0], [9.0, -1.0, 1.0, 9.0])])
    advantages = found["advantages"]
    assert (advantages["low"], advantages["high"]) == (-1.0, 1.0)
    assert sum(advantages["counts"]) == 2
    assert advantages["counts"][0] == advantages["counts"][-1] == 1
    assert len(advantages["counts"]) == BINS
    assert found["places"] == {
        "width": 1, "count": [1, 1], "mean": [-1.0, 1.0], "std": [0.0, 0.0],
    }  # fmt: skip
    assert "calibration" not in found


def test_places_count_from_the_beginning_of_each_answer_of_a_tree():
    # A prompt of 2 tokens with 2 answers, and another sequence in the same row: a
    # prompt of 1 token, an answer, a tool's token, and an answer again.
    ends = [6, 6, 4, 4, 6, 6, 10, 10, 10, 10]
    positions = [0, 1, 2, 3, 2, 3, 0, 1, 2, 3]
    mask = [0, 0, 1, 1, 1, 1, 0, 1, 0, 1]
    advantages = [0, 0, 1, 2, 3, 4, 0, 5, 0, 6]
    found = diagnostics([batch(ends, mask, advantages, positions)])["places"]
    assert found["count"] == [3, 2, 1]
    # At 0: 1, 3, 5; at 1: 2, 4; at 2, after the tool's token: 6.
    assert found["mean"] == [3.0, 3.0, 6.0]
    assert found["std"] == pytest.approx([np.std([1, 3, 5]), 1.0, 0.0], rel=1e-5)


def test_long_answers_have_few_places():
    length = 1000
    found = diagnostics([batch([length] * length, [1] * length, [1.0] * length)])
    places = found["places"]
    assert places["width"] == length // PLACES
    assert places["count"] == [50] * PLACES
    # All advantages are equal: the histogram has a width all the same.
    assert (found["advantages"]["low"], found["advantages"]["high"]) == (0.5, 1.5)
    assert sum(found["advantages"]["counts"]) == length


def test_a_critic_that_is_right_lies_on_the_line():
    values = np.linspace(0.0, 1.0, 100)
    made = batch(
        [100] * 100, [1] * 100, [0.0] * 100, values_before=values, returns=values
    )
    found = diagnostics([made, made])
    means = found["calibration"]
    assert means["value"] == pytest.approx(means["return"])
    assert means["value"] == sorted(means["value"])
    assert len(means["value"]) == 10
    wrong = made.replace(returns=np.array([1 - values], np.float32))
    means = diagnostics([wrong])["calibration"]
    sums = np.add(means["return"], means["value"])
    assert sums == pytest.approx(np.ones(10), abs=2e-6)
    json.dumps(found, allow_nan=False)


def test_places_without_tokens_are_null():
    found = diagnostics([batch([3] * 3, [1, 0, 1], [1.0, 0.0, 2.0])])["places"]
    assert found["mean"] == [1.0, None, 2.0]
    assert diagnostics([batch([2] * 2, [0, 0], [1.0, 1.0])]) == {}
