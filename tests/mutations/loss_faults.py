"""Faults of losses and of algorithms, of the kind that trains wrong in silence."""

from tests.mutations.fault import Fault

__all__ = ["LOSSES"]

POLICY = "losses/test_policy.py losses/test_policy_variants.py"
RETURNS = "losses/test_returns.py"
SEQUENCE = "losses/test_sequences.py losses/test_ratios.py losses/test_reduce.py"

LOSSES = [
    Fault(
        "the surrogate takes the better of clipped and plain",
        "losses/policy.py",
        "-jnp.minimum(ratio * advantages, clipped_ratio * advantages)",
        "-jnp.maximum(ratio * advantages, clipped_ratio * advantages)",
        POLICY,
    ),
    Fault(
        "the clip's bounds are exchanged",
        "losses/policy.py",
        "within(ratio, 1 - clip_low, 1 + clip_high)",
        "within(ratio, 1 - clip_high, 1 + clip_low)",
        POLICY,
    ),
    Fault(
        "the dual clip acts on positive advantages",
        "losses/policy.py",
        "jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip",
        "jnp.where(advantages > 0, jnp.minimum(loss, -dual_clip",
        POLICY,
    ),
    Fault(
        "advantages carry a gradient",
        "losses/policy.py",
        "return counted(jax.lax.stop_gradient(values), mask)",
        "return counted(values, mask)",
        "losses/test_policy.py losses/test_gradients.py losses/test_contract.py",
    ),
    Fault(
        "CISPO's weight carries a gradient",
        "losses/policy.py",
        "weight = jax.lax.stop_gradient(within(ratio, ratio_low, ratio_high))",
        "weight = within(ratio, ratio_low, ratio_high)",
        POLICY,
    ),
    Fault(
        "a masked token's NaN reaches a loss",
        "losses/sequences.py",
        "return jnp.where(mask, values.astype(jnp.float32), 0.0)",
        "return values.astype(jnp.float32) * mask",
        "losses/test_sequences.py losses/test_contract.py",
    ),
    Fault(
        "padding counts as a sequence",
        "losses/sequences.py",
        "return mask if segment_ids is None else mask & (segment_ids > 0)",
        "return mask if segment_ids is None else mask & (segment_ids >= 0)",
        SEQUENCE,
    ),
    Fault(
        "the proximal log-probs carry a gradient",
        "losses/ratios.py",
        "constant = counted(jax.lax.stop_gradient(proximal_logprobs), mask)",
        "constant = counted(proximal_logprobs, mask)",
        "losses/test_ratios.py losses/test_gradients.py losses/test_contract.py",
    ),
    Fault(
        "GSPO's ratio is the product, not the mean",
        "losses/ratios.py",
        "log_ratio = sequence_mean(difference, mask, segment_ids)",
        "log_ratio = sequence_sum(difference, mask, segment_ids)",
        "losses/test_ratios.py",
    ),
    Fault(
        "k2 lacks its half",
        "losses/kl.py",
        "0.5 * jnp.square(d)",
        "jnp.square(d)",
        "losses/test_kl.py",
    ),
    Fault(
        "k3 is of the other direction",
        "losses/kl.py",
        "jnp.expm1(-d) + d",
        "jnp.expm1(d) - d",
        "losses/test_kl.py",
    ),
    Fault(
        "k3+ has k3's gradient",
        "losses/kl.py",
        "jax.lax.stop_gradient(value) + (slope - jax.lax.stop_gradient(slope))",
        "value",
        "losses/test_kl.py losses/test_kl_terms.py",
    ),
    Fault(
        "groups are divided by the population's deviation",
        "losses/credit/advantages.py",
        "freedom = jnp.maximum(mask.sum(axis=-1, keepdims=True) - ddof, 1)",
        "freedom = jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)",
        "losses/test_advantages.py",
    ),
    Fault(
        "failed samples count in their group's mean",
        "losses/credit/advantages.py",
        "count = jnp.maximum(mask.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)",
        "count = jnp.full_like(smallest, mask.shape[-1])",
        "losses/test_advantages.py",
    ),
    Fault(
        "a sample is part of its own leave-one-out baseline",
        "losses/credit/advantages.py",
        "valid[..., None, :] & ~jnp.eye(samples, dtype=bool)",
        "valid[..., None, :] & jnp.ones((samples, samples), bool)",
        "losses/test_advantages.py",
    ),
    Fault(
        "GAE bootstraps from the sequence behind it in the row",
        "losses/credit/returns.py",
        "return (own > 0) & (_at_next_counted(own, mask, method) == own)",
        "return (own > 0) & (_at_next_counted(own, mask, method) > 0)",
        RETURNS,
    ),
    Fault(
        "GAE's advantage is off by one",
        "losses/credit/returns.py",
        "deltas = rewards + gamma * jnp.where(followed, next_values, end) - values",
        "deltas = rewards + gamma * jnp.where(followed, next_values, end)",
        RETURNS,
    ),
    Fault(
        "GAE forgets gamma between tokens",
        "losses/credit/returns.py",
        "_over_states(gamma * decay, deltas, states, followed, method)",
        "_over_states(decay, deltas, states, followed, method)",
        RETURNS,
    ),
    Fault(
        "the reward stands at every token",
        "losses/credit/returns.py",
        "last = mask & ~_followed(mask, ids)",
        "last = mask",
        RETURNS,
    ),
    Fault(
        "whitening divides by the variance",
        "losses/credit/whitening.py",
        "jnp.where(variance == 0, 1.0, jnp.sqrt(variance + epsilon))",
        "jnp.where(variance == 0, 1.0, variance + epsilon)",
        "losses/test_whitening.py",
    ),
    Fault(
        "pooled moments forget the distance of their means",
        "losses/credit/whitening.py",
        "self.m2 + other.m2 + jnp.square(delta) * self.count * share",
        "self.m2 + other.m2",
        "losses/test_whitening.py",
    ),
    Fault(
        "the mean over sequences counts tokens",
        "losses/reduce.py",
        "return Metric.of(shares.sum(), sequence_count(mask, segment_ids))",
        "return Metric.of(shares.sum(), mask.sum())",
        "losses/test_reduce.py losses/test_reduce_modes.py",
    ),
    Fault(
        "sequences without a counted token are counted",
        "losses/sequences.py",
        "return mask.any(axis=-1).sum().astype(jnp.float32)",
        "return jnp.float32(mask[..., 0].size)",
        "losses/test_sequences.py losses/test_reduce.py losses/test_contract.py",
    ),
    Fault(
        "the value clip takes the smaller error",
        "losses/value.py",
        "return 0.5 * jnp.maximum(plain, clipped)",
        "return 0.5 * jnp.minimum(plain, clipped)",
        "losses/test_value.py",
    ),
    Fault(
        "truncated weights are not bounded",
        "losses/correction.py",
        "return jnp.minimum(weights.astype(jnp.float32), cap)",
        "return weights.astype(jnp.float32)",
        "losses/test_correction.py",
    ),
    Fault(
        "importance weights carry a gradient",
        "losses/correction.py",
        "    return jax.lax.stop_gradient(\n"
        "        token_ratio(proximal_logprobs, behavior_logprobs, mask)\n    )",
        "    return token_ratio(proximal_logprobs, behavior_logprobs, mask)",
        "losses/test_correction.py losses/test_contract.py losses/test_gradients.py",
    ),
    Fault(
        "DPO's reference carries a gradient",
        "losses/answers/preference.py",
        "constant = jax.lax.stop_gradient(reference_logprobs)",
        "constant = reference_logprobs",
        "losses/test_preference.py losses/test_contract.py",
    ),
    Fault(
        "DPO's label smoothing has the wrong sign",
        "losses/answers/preference.py",
        "loss = loss - label_smoothing * jax.nn.log_sigmoid(-scaled)",
        "loss = loss + label_smoothing * jax.nn.log_sigmoid(-scaled)",
        "losses/test_preference.py",
    ),
    Fault(
        "IPO's margin is 1 / beta",
        "losses/answers/preference.py",
        "- 1 / (2 * beta)",
        "- 1 / beta",
        "losses/test_preference.py",
    ),
    Fault(
        "distillation's directions are exchanged",
        "losses/distill.py",
        "    teacher, student = _cooled(teacher_logits, student_logits, temperature)\n"
        "    return kl_divergence(student, teacher, mask)",
        "    teacher, student = _cooled(teacher_logits, student_logits, temperature)\n"
        "    return kl_divergence(teacher, student, mask)",
        "losses/test_distill.py",
    ),
    Fault(
        "the entropy bonus is a penalty",
        "losses/entropy.py",
        "return counted(-entropy, mask)",
        "return counted(entropy, mask)",
        "losses/test_entropy.py",
    ),
    Fault(
        "the entropy bonus is added twice",
        "algorithms/composition.py",
        "per_token = per_token + bonus",
        "per_token = per_token + 2 * bonus",
        "algorithms/test_objective.py",
    ),
    Fault(
        "the correction weighs the KL too",
        "algorithms/composition.py",
        "penalty = kl_estimator(policy_logprobs, reference, mask)",
        "penalty = kl_estimator(policy_logprobs, reference, mask)\n"
        "            if correction is not None:\n"
        "                penalty = penalty * corrected.weights",
        "algorithms/test_objective.py algorithms/test_corrections.py",
    ),
    Fault(
        "the ratio is to the sampler, not to the proximal policy",
        "algorithms/composition.py",
        'old = behavior if anchor == "behavior" else proximal',
        "old = behavior",
        "algorithms/test_objective.py algorithms/test_policy_gradient.py",
    ),
    Fault(
        "PPO's advantages are not whitened",
        "algorithms/token_credit.py",
        "per_token = whitening.whitened(raw, mask) if whiten else raw",
        "per_token = raw",
        "algorithms/test_token_credit.py",
    ),
    Fault(
        "the critic learns what it says after the token",
        "algorithms/token_credit.py",
        "jnp.take_along_axis(predictions.values_after, batch.previous, axis=-1)",
        "predictions.values_after",
        "algorithms/test_token_credit.py",
    ),
]
