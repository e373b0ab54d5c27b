"""Every public function of jaxrl_post.losses, as the contract tests need it."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from jaxrl_post import losses
from jaxrl_post.losses import (
    advantages,
    anchored,
    baselines,
    correction,
    diagnostics,
    distill,
    distribution_kl,
    entropy,
    implicit,
    kl,
    logprobs,
    margins,
    policy,
    preference,
    ratios,
    recurrence,
    reduce,
    reference_free,
    rejection,
    returns,
    reward_model,
    sequences,
    shaping,
    staleness,
    supervised,
    trust_region,
    unpaired,
    value,
    whitening,
)
from jaxrl_post.metrics import Metric
from jaxrl_post.types import Array
from tests.losses.contract import ROWS, Case

# Functions without a case, and why.
EXCEPTIONS = {
    "arguments.checked": "a decorator (test_arguments.py)",
    "ratios.MAX_LOG_RATIO": "a number",
    "recurrence.Method": "a type",
    "staleness.capacity": "ints of the host, never traced (test_staleness.py)",
    "whitening.AxisName": "a type",
}


def public_names() -> set[str]:
    """Public functions of the package's modules, as "module.name"."""
    modules = [getattr(losses, name) for name in losses.__all__]
    assert all(isinstance(module, ModuleType) for module in modules)
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules
        for name in module.__all__
    }


def element_by_element(
    function: Callable[..., Any], *, nan: bool = True, **keywords: Any
) -> Case:
    """A function of scalars, on one row of the batch after the other."""
    over_rows = jnp.vectorize(partial(function, **keywords), signature="(),()->()")
    takes = "coefficient observed"
    return Case(over_rows, takes, through=None, nan=nan, covers=function)


def token_mean_over(
    values: Array, mask: Array, ids: Array, denominator: Array, *, parts: int = 1
) -> Metric:
    metric = reduce.token_mean(values, mask, ids)
    return reduce.with_denominator(metric, denominator, parts=parts)


def whitened_by_moments(
    values: Array, mask: Array, *, axis_name: str | None = None
) -> Array:
    moments = whitening.Moments.of(values, mask, axis_name=axis_name)
    return whitening.whitened(values, mask, moments=moments)


CLIP = {"clip_low": 0.2, "clip_high": 0.2}
BETA = {"beta": 0.3}
WHOLE = {"axis_name": "rows"}
INTEGER, BOOL = jnp.int32, jnp.bool_
PAIR = "chosen rejected reference_chosen reference_rejected valid"

_TOKEN_CASES = (
    Case(ratios.token_log_ratio, "p q mask", through="p"),
    Case(ratios.token_ratio, "p q mask", through="p", elsewhere=1.0),
    Case(ratios.sequence_ratio, "p q mask ids", through="p", elsewhere=None),
    Case(ratios.sequence_product_ratio, "p q mask ids", through="p", elsewhere=None),
    Case(ratios.gspo_token_ratio, "p q mask ids", through="p", elsewhere=None),
    Case(policy.clipped_surrogate, "p q a mask", CLIP, "p"),
    Case(
        policy.clipped_surrogate,
        "p q a mask",
        {"dual_clip": 3.0, **CLIP},
        "p",
        variant="dual",
    ),
    Case(policy.cispo, "p q a mask", {"ratio_low": 0.0, "ratio_high": 5.0}, "p"),
    Case(policy.reinforce, "p a mask", through="p"),
    Case(policy.sapo, "p q a mask", through="p"),
    Case(policy.gspo, "p q a mask ids", CLIP, "p"),
    Case(policy.gspo_token, "p q a mask ids", CLIP, "p"),
    Case(policy.gmpo, "p q a mask ids", through="p"),
    Case(policy.clipped_sequence_surrogate, "p q a mask ids", CLIP, "p"),
    Case(policy.vespo, "p q a mask ids", through="p"),
    Case(kl.k1, "p q mask", through="p"),
    Case(kl.k2, "p q mask", through="p"),
    Case(kl.k3, "p q mask", through="p"),
    Case(kl.k3_plus, "p q mask", through="p"),
    Case(kl.with_score_term, "a p mask", through="a p"),
    Case(kl.with_importance_weights, "a p q mask", {"cap": 2.0}, "a"),
    element_by_element(kl.adaptive_coefficient, target=0.5, horizon=10.0),
    Case(entropy.entropy_bonus, "distance mask", through="distance"),
    element_by_element(
        entropy.adaptive_coefficient, target=0.5, step=0.25, low=0.0, high=1.0
    ),
    # A closed gate hides the coefficient, and an entropy of NaN leaves it open.
    element_by_element(entropy.gated_coefficient, nan=False, target=0.5),
    Case(entropy.top_entropy_mask, "distance mask", parts="own", dtype=BOOL),
    Case(entropy.entropy_quantile_mask, "distance mask", parts="own", dtype=BOOL),
    Case(entropy.covariance, "p a mask", parts="own"),
    Case(
        entropy.clip_cov_mask,
        "distance mask key",
        {"fraction": 1.0, "low": 0.2, "high": 5.0},
        parts="own",
        dtype=BOOL,
    ),
    Case(
        entropy.kl_cov_mask,
        "distance mask",
        {"fraction": 0.3},
        parts="own",
        dtype=BOOL,
    ),
    Case(
        entropy.clip_cov,
        "p q a mask key",
        {"fraction": 0.5, "cov_range": (0.0, 5.0), **CLIP},
        "p",
        "own",
    ),
    Case(
        entropy.kl_cov,
        "p q a mask",
        {"kl_coefficient": 2.0, "fraction": 0.3},
        "p",
        "own",
    ),
    Case(correction.token_weights, "p q mask", elsewhere=1.0),
    Case(correction.sequence_weights, "p q mask ids", elsewhere=None),
    Case(correction.truncated, "ratio", {"cap": 1.2}, "ratio"),
    Case(correction.icepop, "ratio", {"low": 0.8, "high": 1.2}, "ratio"),
    Case(correction.decoupled_weights, "p q mask", {"cap": 1.2}, elsewhere=1.0),
    Case(
        correction.sequence_masked,
        "ratio p q mask ids",
        {"low": 0.5, "high": 2.0},
        "ratio",
        elsewhere=None,
    ),
    Case(rejection.reject_tokens, "ratio mask", {"low": 0.8, "high": 1.2}, dtype=BOOL),
    *(
        Case(
            rejection.reject_sequences,
            "ratio mask ids",
            {"statistic": statistic, "high": 1.2},
            dtype=BOOL,
            variant=statistic,
        )
        for statistic in ("mean", "sum", "max")
    ),
    Case(staleness.ages, "versions version mask", dtype=INTEGER),
    Case(
        staleness.within_staleness,
        "versions version mask",
        {"max_age": 1},
        dtype=BOOL,
    ),
    Case(
        staleness.staleness_weights,
        "versions version mask",
        {"decay": 0.5},
        elsewhere=1.0,
    ),
    *(
        Case(
            staleness.interpolated_proximal,
            "q p versions mask policy_version=version",
            {"proximal_version": 2, "space": space},
            variant=space,
        )
        for space in ("log", "linear")
    ),
    Case(supervised.next_token_loss, "p mask", through="p"),
    Case(supervised.dynamic_fine_tuning_loss, "p mask", through="p"),
    Case(trust_region.binary_tv, "p q mask"),
    Case(trust_region.binary_kl, "p q mask"),
    Case(trust_region.topk_tv, "p_top q_top mask"),
    Case(trust_region.topk_kl, "p_top q_top mask"),
    Case(
        trust_region.dppo_mask,
        "ratio distance a mask",
        {"threshold": 0.2},
        dtype=BOOL,
    ),
    *(
        Case(
            trust_region.dppo,
            "p q a mask",
            {
                "divergence": divergence,
                "threshold": 0.15,
                "ratio_high": ratio_high,
            },
            "p",
            variant=divergence.__name__,
        )
        for divergence, ratio_high in (
            (trust_region.binary_tv, None),
            (trust_region.binary_kl, 2.0),
        )
    ),
    Case(trust_region.opsm_keep, "a distance", {"threshold": 0.2}, dtype=BOOL),
    Case(trust_region.opsm_mask, "p q a mask ids", {"threshold": 0.2}, dtype=BOOL),
    Case(value.clipped_value_loss, "a p q mask", {"value_clip": 0.4}, "a"),
    Case(
        value.clipped_value_loss,
        "a q q mask",
        {"value_clip": None},
        "a",
        variant="plain",
    ),
    Case(value.explained_variance, "p q mask", parts="own"),
    Case(shaping.kl_shaped_rewards, "a q mask", {"kl_coefficient": 0.5}),
    Case(shaping.repetition_penalty, "tokens mask", {"ngram": 2}),
)
_LOGIT_CASES = (
    Case(distribution_kl.entropy, "student mask", through="student"),
    Case(
        distribution_kl.kl_divergence,
        "teacher student mask",
        through="teacher student",
    ),
    Case(
        distribution_kl.jensen_shannon,
        "teacher student mask",
        BETA,
        through="teacher student",
    ),
    Case(distill.forward_kl, "teacher student mask", {"temperature": 1.5}, "student"),
    Case(distill.reverse_kl, "teacher student mask", {"temperature": 1.5}, "student"),
    Case(distill.generalized_jsd, "teacher student mask", BETA, "student"),
    *(
        Case(
            distill.top_k_forward_kl,
            "top top_ids student mask",
            {"tail": tail},
            "student",
            variant=tail,
        )
        for tail in ("bucket", "renormalize")
    ),
    Case(distill.on_policy_advantages, "p q mask"),
    Case(logprobs.token_logprobs, "student tokens mask", through="student"),
    Case(
        logprobs.token_logprobs,
        "student tokens mask",
        {"chunk_bytes": 4 * 5 * 7, "temperature": 0.5},
        "student",
        variant="chunked",
    ),
)
_SEQUENCE_CASES = (
    Case(sequences.counted, "a mask", through="a"),
    Case(sequences.in_sequence, "mask ids", dtype=BOOL),
    Case(sequences.sequence_sum, "a mask ids", through="a", elsewhere=None),
    Case(sequences.sequence_mean, "a mask ids", through="a", elsewhere=None),
    Case(sequences.sequence_count, "mask ids", parts="sum"),
    Case(sequences.segment_totals, "a ids", through="a"),
    Case(reduce.token_mean, "a mask ids", {}, "a", "sum"),
    Case(reduce.sequence_mean_of_token_mean, "a mask ids", {}, "a", "sum"),
    Case(reduce.sequence_mean_of_token_sum, "a mask ids", {}, "a", "sum"),
    Case(reduce.constant_denominator, "a mask ids", {"denominator": 4.0}, "a", "sum"),
    Case(reduce.prompt_mean, "a prompt_tokens mask ids", {}, "a", "sum"),
    Case(
        reduce.prompt_token_counts,
        "prompts mask ids",
        {"num_prompts": 3},
        parts="own",
        elsewhere=None,
        dtype=INTEGER,
    ),
    Case(reduce.token_sum, "a mask ids", {}, "a", "sum", {"parts": ROWS}),
    Case(
        token_mean_over,
        "a mask ids denominator",
        {},
        "a denominator",
        "sum",
        {"parts": ROWS},
        covers=reduce.with_denominator,
    ),
    Case(diagnostics.token_mult_prob_error, "p q mask", {}, None, "sum"),
    Case(diagnostics.approximate_kl, "p q mask", {}, None, "sum"),
    Case(diagnostics.sampled_entropy, "p q mask", {}, None, "sum"),
    Case(diagnostics.chi_square, "ratio mask", {}, None, "sum"),
    Case(diagnostics.effective_sample_size, "ratio mask ids", {}, None, "sum"),
    # These count events, and a NaN is none; the loss returned with them shows it.
    *(
        Case(function, takes, bounds, None, "sum", nan=False)
        for function, takes, bounds in (
            (diagnostics.clip_fraction_low, "ratio a mask", {"clip_low": 0.2}),
            (diagnostics.clip_fraction_high, "ratio a mask", {"clip_high": 0.2}),
            (diagnostics.outside_fraction, "ratio mask", {"low": 0.8, "high": 1.2}),
            (value.value_clip_fraction, "a p q mask", {"value_clip": 0.4}),
        )
    ),
    Case(returns.at_last_token, "a mask ids"),
    Case(
        returns.gae,
        "a p mask ids bootstrap=q",
        {"gamma": 0.9, "lambda_": 0.8},
        variant="carry",
    ),
    Case(
        returns.gae,
        "a p mask ids lambda_=unit",
        {"gamma": 0.9, "gaps": "zero"},
        variant="zero",
    ),
    Case(returns.lambda_returns, "a p mask"),
    Case(returns.length_adaptive_lambda, "mask ids", {"alpha": 2.0}, elsewhere=None),
    Case(returns.discounted_returns, "a mask ids", {"gamma": 0.9}),
    Case(returns.reinforce_plus_plus, "a mask ids", {"gamma": 0.9}, "", "rows", WHOLE),
    Case(returns.process_normalized, "step_rewards step_ends step_mask"),
    Case(returns.turn_returns, "rewards turn_mask", {"gamma": 0.9}),
    Case(implicit.implicit_rewards, "p q mask", BETA, "p"),
    Case(implicit.implicit_reward_loss, "p q unit mask ids", BETA, "p"),
    Case(
        implicit.leave_one_out_returns,
        "a mask ids answers answer_groups",
        {"gamma": 0.9},
        parts="own",
    ),
    Case(implicit.bounded_by_return, "a mask ids", parts="own"),
    Case(returns.spread_turns, "rewards turns", through="rewards"),
    *(
        Case(
            recurrence.reverse_linear_recurrence,
            "unit a",
            {"method": method},
            "unit a",
            variant=method,
        )
        for method in ("serial", "associative", "chunked")
    ),
    Case(whitening.whitened, "a mask", of_part=WHOLE),
    Case(whitened_by_moments, "a mask", of_part=WHOLE, covers=whitening.Moments),
)
_PAIR_CASES = (
    Case(preference.counted_pairs, "margin valid", through="margin"),
    Case(preference.log_ratio, "chosen reference_chosen valid", through="chosen"),
    Case(preference.log_ratio_margin, PAIR, through="chosen rejected"),
    Case(preference.alpha_divergence_margin, PAIR, {"alpha": 0.5}, "chosen rejected"),
    Case(preference.jensen_shannon_margin, PAIR, through="chosen rejected"),
    Case(preference.sigmoid_loss, "margin valid", BETA, "margin"),
    Case(
        preference.sigmoid_loss,
        "margin valid",
        {"label_smoothing": 0.1, **BETA},
        "margin",
        variant="smoothed",
    ),
    Case(
        preference.robust_loss,
        "margin valid",
        {"label_smoothing": 0.1, **BETA},
        "margin",
    ),
    Case(preference.hinge_loss, "margin valid", BETA, "margin"),
    Case(preference.ipo_loss, "margin valid", BETA, "margin"),
    *(
        Case(function, "chosen rejected valid", BETA, "chosen rejected")
        for function in (
            anchored.apo_zero_loss,
            anchored.apo_down_loss,
            anchored.bco_pair_loss,
            anchored.nca_loss,
            anchored.sppo_loss,
        )
    ),
    Case(margins.aot_margin, PAIR, {}, "chosen rejected", "own"),
    Case(margins.aot_unpaired_margin, PAIR, {}, "chosen rejected", "own"),
    Case(margins.discopop_loss, "margin valid", BETA, "margin"),
    Case(margins.exo_loss, "margin valid", BETA, "margin"),
    Case(preference.length_normalized, "chosen lengths", through="chosen"),
    Case(preference.wpo_weights, "chosen rejected valid"),
    Case(preference.accuracy, "margin valid", {}, None, "sum"),
    Case(preference.reward_margin, "margin valid", BETA, None, "sum"),
    Case(
        preference.implicit_reward,
        "chosen reference_chosen valid",
        BETA,
        None,
        "sum",
    ),
    Case(
        reference_free.simpo_loss,
        "chosen rejected valid",
        {"target_margin": 0.5, **BETA},
        "chosen rejected",
    ),
    Case(reference_free.cpo_loss, "chosen rejected valid", BETA, "chosen rejected"),
    Case(reference_free.orpo_loss, "chosen rejected valid", {}, "chosen rejected"),
    Case(
        unpaired.kto_loss,
        "chosen reference_chosen desirable point valid",
        BETA,
        "chosen",
    ),
    Case(unpaired.kto_reference_point, "chosen reference_chosen valid", parts="own"),
    Case(
        reward_model.bradley_terry,
        "chosen rejected valid target_margin=margin",
        {"centering": 0.1},
        "chosen rejected",
    ),
    Case(reward_model.process_reward_loss, "a unit mask", through="a"),
    Case(
        shaping.overlong_penalty,
        "lengths",
        {"max_length": 8, "buffer": 4, "bound": "capped"},
    ),
)
_GROUP_CASES = (
    *(
        Case(function, "rewards present", through="rewards")
        for function in (
            advantages.group_mean,
            advantages.group_centered,
            advantages.group_normalized,
            advantages.leave_one_out,
            advantages.leave_one_out_normalized,
        )
    ),
    *(
        Case(function, "rewards present", through="rewards", elsewhere=None)
        for function in (
            advantages.leave_one_out_baseline,
            advantages.leave_one_out_std,
        )
    ),
    Case(baselines.remax, "rewards greedy present"),
    Case(baselines.optimal_baseline, "rewards sample_lengths present"),
    Case(baselines.max_rl, "rewards present"),
    Case(baselines.pass_at_k, "rewards present", {"k": 2}),
    Case(baselines.pass_at_k_estimate, "rewards present", {"k": 2}),
    Case(baselines.gdpo, "components present", of_part=WHOLE),
    Case(
        baselines.gdpo,
        "components present",
        {"epsilon_inside": False},
        of_part=WHOLE,
        variant="outside",
    ),
    Case(baselines.batch_scaled, "rewards present", of_part=WHOLE),
    Case(reward_model.best_of_n, "rewards present", dtype=INTEGER),
    Case(reward_model.best_of_n_value, "rewards present", {"n": 2}, "rewards"),
)
CASES = {
    case.name: case
    for case in (
        *_TOKEN_CASES,
        *_LOGIT_CASES,
        *_SEQUENCE_CASES,
        *_PAIR_CASES,
        *_GROUP_CASES,
    )
}
