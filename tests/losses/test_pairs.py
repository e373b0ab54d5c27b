"""What every function of preference pairs promises, whatever it computes.

Slots without a pair may hold anything and reach neither value nor gradient; gradients
flow through the policy alone; values are float32; jit, vmap and shard_map change
nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.losses import preference, reference_free, reward_model, unpaired

BETA = {"beta": 0.3}
over = pytest.mark.parametrize


def of_margin(function):
    def loss(pc, pr, rc, rr, valid):
        return function(preference.log_ratio_margin(pc, pr, rc, rr), valid)

    return loss


def of_policy(function):
    return lambda pc, pr, rc, rr, valid: function(pc, pr, valid)


def kto_loss(pc, pr, rc, rr, valid):
    point = jnp.array(0.5, jnp.float32)
    return unpaired.kto_loss(pc, rc, jnp.arange(pc.size) % 2 == 0, point, valid, **BETA)


# Of the policy's log-probs of chosen and rejected, the reference's, and `valid`.
DIFFERENTIABLE = {
    "log_ratio": lambda pc, pr, rc, rr, valid: preference.log_ratio(pc, rc, valid),
    "log_ratio_margin": preference.log_ratio_margin,
    "alpha_divergence_margin": partial(preference.alpha_divergence_margin, alpha=0.5),
    "jensen_shannon_margin": preference.jensen_shannon_margin,
    "sigmoid_loss": of_margin(partial(preference.sigmoid_loss, **BETA)),
    "smoothed": of_margin(
        partial(preference.sigmoid_loss, label_smoothing=0.1, **BETA)
    ),
    "robust_loss": of_margin(
        partial(preference.robust_loss, label_smoothing=0.1, **BETA)
    ),
    "hinge_loss": of_margin(partial(preference.hinge_loss, **BETA)),
    "ipo_loss": of_margin(partial(preference.ipo_loss, **BETA)),
    "simpo_loss": of_policy(
        partial(reference_free.simpo_loss, target_margin=0.5, **BETA)
    ),
    "cpo_loss": of_policy(partial(reference_free.cpo_loss, **BETA)),
    "orpo_loss": of_policy(reference_free.orpo_loss),
    "kto_loss": kto_loss,
    "bradley_terry": lambda pc, pr, rc, rr, valid: reward_model.bradley_terry(
        pc, pr, valid, margin=rc, centering=0.1
    ),
}
CONSTANT = {"wpo_weights": of_policy(preference.wpo_weights)}
METRICS = {
    "accuracy": of_margin(preference.accuracy),
    "reward_margin": of_margin(partial(preference.reward_margin, **BETA)),
    "implicit_reward": lambda pc, pr, rc, rr, valid: preference.implicit_reward(
        pc, rc, valid, **BETA
    ),
}
PER_PAIR = DIFFERENTIABLE | CONSTANT


@over("name", DIFFERENTIABLE)
@over("sign", [1.0, -1.0])
def test_gradients_are_finite_for_very_unlikely_responses(name, sign):
    function = DIFFERENTIABLE[name]
    far, near = jnp.full(2, -1e4), jnp.array([-1.0, -20.0])
    policy = (far, near) if sign > 0 else (near, far)

    def total(pc, pr):
        return function(pc, pr, near, near, None).sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(*policy)
    assert jnp.isfinite(value)
    assert jnp.isfinite(jnp.stack(gradients)).all()
