"""Credit over all of a step's batch: what goes in comes back, row by row."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.data import packing
from jaxrl_post.learner.credit import credited
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import TokenBatch


def piece(rewards: list[float], kept_ids: int = 0) -> TokenBatch:
    """A row for each reward, of an answer of three tokens."""
    made = []
    for index, reward in enumerate(rewards):
        said = Tokens.generated([3, 4, 5], [-1.0] * 3, version=0)
        if kept_ids:
            kept = np.full((3, kept_ids), -1, np.int32)
            kept[:, 0], kept[:, 1] = said.ids, 7 + index
            said = dataclasses.replace(said, kept=kept)
        tokens = Tokens.context([1, 2]) + said
        values = np.where(tokens.sampled, reward, 0).astype(np.float32)
        made.append(packing.Sequence(tokens=tokens, advantages=values))
    return packing.pack(made, 5, 1, kept_ids=kept_ids)


@pytest.mark.parametrize("counts", [(3,), (2, 3)])
def test_the_tokens_that_the_sampler_kept_come_back(counts):
    """Three and five rows are padded to four and eight."""
    rewards = [[float(i) for i in range(count)] for count in counts]
    credit = jax.jit(algorithms.reinforce_plus_plus().credit)
    plain, _ = credited(credit, [piece(each) for each in rewards])
    pieces = [piece(each, kept_ids=4) for each in rewards]
    found, metrics = credited(credit, pieces)
    for one, given, without in zip(found, pieces, plain, strict=True):
        assert one.kept.shape == (*given.shape, 4)
        np.testing.assert_array_equal(one.kept, given.kept)
        np.testing.assert_array_equal(one.advantages, without.advantages)
    assert metrics["advantage/raw_std"] > 0
