"""Batches with further inputs of an objective: KTO's reference point."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import models
from jaxrl_post.algorithms import unpaired
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.data import packing
from jaxrl_post.data.preferences import JudgedAnswer
from jaxrl_post.examples.packed import JudgedExamples
from jaxrl_post.learner.feed import Feed, Measured
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.reference import Reference
from jaxrl_post.messages import Message
from jaxrl_post.models import MixtureOfExperts, ModelConfig
from tests.programs.trainers import make_model

ROW, DRAWN = 24, [0, 3, 5, 6, 9, 4]
KTO = unpaired.kto(beta=0.3)
JUDGEMENTS = JudgedExamples(
    *[
        [
            JudgedAnswer(
                (Message("user", f"{i}="),), f"{word} {i}", word == "yes", f"{i}="
            )
            for i in range(5)
            for word in ("yes", "no")
        ]
    ]
    * 2
)
MISMATCHED = JUDGEMENTS.mismatched(max_tokens=ROW)


@functools.cache
def begun(rows: int):
    """(model, learner, its parameters, other parameters)."""
    model = make_model()
    learner, state = begin_training(
        model,
        KTO.objective,
        OptimizerConfig(),
        UpdateConfig(microbatch_tokens=rows * ROW),
        num_steps=1,
    )
    jax.set_mesh(learner.mesh)
    other = jax.tree.map(lambda leaf: 1.5 * leaf, state.params)
    return model, learner, state.params, other


def feed(rows: int, *, swapped: bool = False) -> tuple[Feed, object]:
    """A feed whose policy and reference differ, and the policy's parameters."""
    model, learner, policy, reference = begun(rows)
    jax.set_mesh(learner.mesh)
    if swapped:
        policy, reference = reference, policy
    measured = Measured(MISMATCHED, KTO.mismatched)
    scores = Reference(learner.scorer, reference)
    return Feed(
        JUDGEMENTS, measured, model.tokenizer, rows * ROW, learner, scores
    ), policy


def mean_log_ratio(each: Feed, params) -> float:
    """From the mismatched answers, each in a row of its own."""
    sequences = [
        MISMATCHED.encode(each.tokenizer, "train", index)[0] for index in DRAWN
    ]
    total = 0.0
    for sequence in sequences:
        batch = packing.pack([sequence], ROW, each.learner.microbatch_rows)
        for sign, scored in ((1, params), (-1, each.reference.params)):
            found = each.learner.scorer.predict(scored, batch).logprobs
            total += sign * float(found[batch.loss_mask].astype(float).sum())
    return total / len(sequences)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_reference_point_is_of_all_that_is_drawn(swapped):
    losses, expected = [], mean_log_ratio(*feed(4, swapped=swapped))
    assert abs(expected) > 0.05
    assert (expected < 0) == swapped, "the reference point is 0 in one direction"
    for rows in (1, 4):
        each, params = feed(rows, swapped=swapped)
        drawn = each.scored(each.draw("train", DRAWN))
        assert (drawn.batch.shape[0] > 1) == (rows == 1), "several microbatches, or one"
        batch = each.ready(params, drawn)
        np.testing.assert_allclose(batch.reference_point, expected, rtol=1e-4)
        measured = each.learner.evaluate(params, batch)
        assert measured["preference/reference_point"] == pytest.approx(
            max(expected, 0.0), rel=1e-4
        )
        losses.append(measured["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_reference_point_is_without_the_routers_losses():
    """It is 0 where the policy is the reference, for all losses of the routers."""
    model = make_model()
    config = ModelConfig(
        "qwen3_moe", model.config.vocab_size, 16, 24, 1, num_heads=2, num_kv_heads=2,
        experts=MixtureOfExperts(4, 2, 12),
    )  # fmt: skip
    specs = models.param_specs(config)
    params = models.initialize(jax.random.key(0), specs, jnp.float32, model.mesh)
    learner, state = begin_training(
        dataclasses.replace(model, config=config, specs=specs, params=params),
        KTO.objective,
        OptimizerConfig(),
        UpdateConfig(microbatch_tokens=4 * ROW, router_balance=0.5, router_z=0.25),
        num_steps=1,
    )
    jax.set_mesh(learner.mesh)
    measured = Measured(MISMATCHED, KTO.mismatched)
    reference = Reference(learner.scorer, state.params)
    each = Feed(JUDGEMENTS, measured, model.tokenizer, 4 * ROW, learner, reference)
    batch = each.ready(state.params, each.scored(each.draw("train", DRAWN)))
    np.testing.assert_allclose(batch.reference_point, 0.0, atol=1e-6)


def test_the_reference_scores_answers_and_mismatched_ones():
    each, _ = feed(4)
    drawn = each.scored(each.draw("eval", [1, 2]))
    for batch in (drawn.batch, drawn.measured):
        found = each.learner.scorer.predict(each.reference.params, batch).logprobs
        np.testing.assert_array_equal(batch.reference_logprobs, found)
        assert (found[batch.loss_mask] < 0).all()
    texts = [
        {
            each.tokenizer.decode(batch.tokens[row][batch.ends[row] == s].tolist())
            for row in range(batch.shape[0])
            for s in np.unique(batch.ends[row])
            if s
        }
        for batch in (drawn.batch, drawn.measured)
    ]
    assert texts == [{"0=no 0", "1=yes 1"}, {"0=no 1", "1=yes 2"}]


def test_what_asks_for_nothing_gets_nothing():
    each, params = feed(4)
    plain = Feed(JUDGEMENTS, None, each.tokenizer, ROW, each.learner, None)
    drawn = plain.scored(plain.draw("train", DRAWN))
    assert drawn.measured is None
    assert drawn.batch.reference_logprobs is None
    assert plain.ready(params, drawn) is drawn.batch
