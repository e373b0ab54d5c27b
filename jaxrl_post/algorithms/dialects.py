"""GRPO, Dr. GRPO and CISPO as other frameworks compute them.

A `Framework` is a row of the table below. `grpo`, `dr_grpo` and `cispo` compose from it
the framework's algorithm, so that the framework's runs can be continued or checked:

             epsilon  alone  KL (k3)  its weight  dual clip  sampler's mismatch
    VERL     1e-6     raw    <= 10    -           3          -
    TRL      1e-4     0      -        p / q       -          sequences, w <= 3
    NEMO_RL  1e-6     0      <= 10    p / p       -          -
    OPENRLHF 1e-9     0      <= 10    -           -          -

as of these releases, with which values and gradients were compared in November 2026:

    VERL     0.9.0  (2026-08-14)    NEMO_RL   0.7.0  (2026-07-29)
    TRL      1.16.0 (2026-10-15)    OPENRLHF  0.11.0 (2026-08-13)

"Alone" is the advantage of a group's only sample; OpenRLHF refuses such groups. The
mean is over all tokens unless another reduction is given. All take the sample standard
deviation (n - 1). NeMo RL takes it and the baseline from the group's other samples, and
does not scale the advantage if these do not vary (always so in a group of two). The
KL's weight is a ratio with a gradient (`kl_weights.ratio`): of the policy to the
proximal policy q in TRL, to its own held value in NeMo RL, which changes the gradient
alone. The policy ratio's logarithm is clamped to +-20 for all here, as in verl and
OpenRLHF. OpenRLHF also clips the advantages to +-10, which groups of up to 100 samples
do not reach.

What the frameworks call these options:

    VERL     clip_ratio_low, clip_ratio_high, clip_ratio_c (dual_clip), kl_loss_coef,
             loss_agg_mode (reduction), rollout_correction
    TRL      epsilon, epsilon_high, delta (dual_clip), beta (kl_coefficient),
             use_bias_correction_kl (kl_weights; before 1.10 it was off: None),
             loss_type (reduction), vllm_importance_sampling_mode, _clip_min and
             _clip_max (correction), scale_rewards, which `dr_grpo` takes to be "none"
    NEMO_RL  ratio_clip_min, ratio_clip_max, ratio_clip_c (dual_clip),
             reference_policy_kl_penalty, use_on_policy_kl_approximation (kl_weights,
             with anchor="behavior"; before 0.7 the weight had no gradient, and without
             the option there was none), token_level_loss (reduction),
             use_importance_sampling_correction
    OPENRLHF actor.eps_clip_low_high, actor.dual_clip, algo.kl.init_coef,
             algo.kl.estimator (with algo.kl.use_loss; k1 if none is given),
             algo.advantage.is_correction_enable; its advantage.estimator dr_grpo is the
             mean over tokens with `advantages.group_centered`

`losses.reduce` says which frameworks divide by all sequences, and which by those with a
counted token. Choices outside an `Algorithm` are keywords of the losses:
`returns.gae(gaps=)` for values across tokens that the policy did not produce, and
`shaping.overlong_penalty(bound=)` for the overlong penalty's bound.

References:
    verl, verl/trainer/ppo/core_algos.py, https://github.com/volcengine/verl.
    TRL, trl/trainer/grpo_trainer.py, https://github.com/huggingface/trl.
    NeMo RL, nemo_rl/algorithms/loss/loss_functions.py and
    examples/configs/grpo_math_1B.yaml, https://github.com/NVIDIA-NeMo/RL.
    OpenRLHF, openrlhf/models/loss.py and openrlhf/trainer/ppo_utils/
    experience_maker.py, https://github.com/OpenRLHF/OpenRLHF.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Unpack

from jaxrl_post.algorithms import kl_weights, terms
from jaxrl_post.algorithms.composition import SharedOptions, compose, only_shared
from jaxrl_post.algorithms.corrections import icepop_sequences
from jaxrl_post.algorithms.objective import (
    Algorithm,
    KlEstimator,
    PolicyLoss,
    Reduction,
)
from jaxrl_post.losses import advantages, entropy, kl, reduce
from jaxrl_post.types import Array, Float

__all__ = [
    "NEMO_RL",
    "OPENRLHF",
    "TRL",
    "VERL",
    "Framework",
    "cispo",
    "dr_grpo",
    "grpo",
    "trl_grpo",
]

# verl and NeMo RL clamp the log-ratio to +-20 and the result to +-10, NeMo RL with the
# weight. OpenRLHF clamps the result alone, which is the same: at a log-ratio of +-20
# the result exceeds 10.
CLAMPED_K3: KlEstimator = partial(kl.k3, max_log_ratio=20.0, max_value=10.0)
PLAIN_K3: KlEstimator = partial(kl.k3, max_log_ratio=None)

type Advantages = Callable[..., Float[Array, "groups samples"]]


class Framework(NamedTuple):
    """A framework's defaults.

    Attributes:
        name: the framework's name, for messages.
        normalized: advantages over their group's standard deviation.
        shared: KL, its weights, correction and entropy.
        centered: advantages of its Dr. GRPO; None if it has no Dr. GRPO.
        dual_clip: dual clip of its clipped surrogate; None for none.
        ratio_bounds: bounds of its CISPO; None if it has no CISPO.
    """

    name: str
    normalized: Advantages
    shared: SharedOptions
    centered: Advantages | None = None
    dual_clip: float | None = None
    ratio_bounds: tuple[float, float] | None = None


VERL = Framework(
    "verl",
    partial(advantages.group_normalized, ddof=1, epsilon=1e-6, single="raw"),
    SharedOptions(kl_estimator=CLAMPED_K3, correction=None),
    centered=partial(advantages.group_centered, single="raw"),
    dual_clip=3.0,
    # 1 -+ clip_ratio_low, clip_ratio_high.
    ratio_bounds=(0.8, 1.2),
)
TRL = Framework(
    "TRL",
    partial(advantages.group_normalized, ddof=1, epsilon=1e-4),
    # GRPOConfig: vllm_importance_sampling_mode "sequence_mask", _cap 3.0.
    SharedOptions(
        kl_estimator=PLAIN_K3,
        kl_weights=kl_weights.ratio(),
        correction=icepop_sequences(low=0.0, high=3.0),
    ),
    centered=advantages.group_centered,
    # epsilon_high is the bound itself. TRL recommends 5; its default, 0.2, is meant for
    # the clip of GRPO.
    ratio_bounds=(0.0, 5.0),
)
NEMO_RL = Framework(
    "NeMo RL",
    partial(advantages.leave_one_out_normalized, epsilon=1e-6),
    SharedOptions(
        kl_coefficient=0.01,
        kl_estimator=partial(kl.k3, max_log_ratio=20.0),
        kl_weights=kl_weights.ratio(anchor="policy", max_value=10.0),
        correction=None,
    ),
    # 1 -+ ratio_clip_min, ratio_clip_max.
    ratio_bounds=(0.8, 1.2),
)
# With use_kl_loss; without it OpenRLHF's KL is in the reward, after the normalisation.
OPENRLHF = Framework(
    "OpenRLHF",
    partial(advantages.group_normalized, ddof=1, epsilon=1e-9),
    SharedOptions(kl_coefficient=0.01, kl_estimator=CLAMPED_K3, correction=None),
)


def grpo(
    framework: Framework,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    reduction: Reduction = reduce.token_mean,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """A framework's GRPO.

    Args:
        framework: one of this module.
        dual_clip: > 1; None for the framework's own, which
            `framework._replace(dual_clip=None)` takes away.
        reduction: one of `losses.reduce`.
        **shared: see `SharedOptions`; they override the framework's own.

    >>> import jax.numpy as jnp
    >>> grpo(VERL).advantages(jnp.array([[7.0]]), jnp.array([[True]])).tolist()
    [[7.0]]
    >>> grpo(NEMO_RL).needs_reference
    True
    """
    dual_clip = framework.dual_clip if dual_clip is None else dual_clip
    if framework.name == TRL.name:
        _check_trl(clip_high, dual_clip, reduction, shared)
    return compose(
        advantages=framework.normalized,
        policy_loss=terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        ),
        reduction=reduction,
        **(framework.shared | only_shared(grpo, shared)),
    )


def dr_grpo(
    framework: Framework,
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """A framework's Dr. GRPO, `VERL`'s or `TRL`'s.

    Args:
        framework: one of this module.
        denominator: > 0, in tokens; TRL's max_completion_length, verl's
            loss_scale_factor, whose default in verl is the padded width of the batch's
            responses.
        dual_clip: > 1; None for the framework's own, which
            `framework._replace(dual_clip=None)` takes away.
        **shared: see `SharedOptions`; they override the framework's own.

    Raises:
        ValueError: a hyperparameter is out of its range, or the framework has no
            Dr. GRPO.

    >>> dr_grpo(TRL, denominator=256.0).needs_reference
    False
    """
    if framework.centered is None:
        raise ValueError(f"framework must have a Dr. GRPO, got {framework.name}")
    return grpo(
        framework._replace(normalized=framework.centered),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        reduction=partial(reduce.constant_denominator, denominator=denominator),
        **shared,
    )


def cispo(
    framework: Framework,
    *,
    ratio_low: float | None = None,
    ratio_high: float | None = None,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """A framework's CISPO; OpenRLHF has none.

    Args:
        framework: one of this module.
        ratio_low: in [0, 1], bound of the ratio; verl's 1 - clip_ratio_low, NeMo RL's
            1 - ratio_clip_min; TRL has no lower bound (0). None for the framework's
            own.
        ratio_high: >= 1, bound of the ratio; verl's 1 + clip_ratio_high, NeMo RL's 1 +
            ratio_clip_max, TRL's epsilon_high. None for the framework's own.
        **shared: see `SharedOptions`; they override the framework's own.

    Raises:
        ValueError: a hyperparameter is out of its range, or the framework has no CISPO.

    >>> cispo(VERL, ratio_high=1.28).needs_reference
    False
    """
    if framework.ratio_bounds is None:
        raise ValueError(f"framework must have a CISPO, got {framework.name}")
    low, high = framework.ratio_bounds
    return compose(
        advantages=framework.normalized,
        policy_loss=terms.weighting_token_ratio(
            ratio_low=low if ratio_low is None else ratio_low,
            ratio_high=high if ratio_high is None else ratio_high,
        ),
        reduction=reduce.token_mean,
        **(framework.shared | only_shared(cispo, shared)),
    )


def trl_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: Literal["token", "sequence"] = "token",
    threshold: float | None = None,
    quantile: float = 0.0,
    reduction: Reduction = reduce.token_mean,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """TRL's GRPO with the options that only TRL has.

    Args:
        dual_clip: > 1 + clip_high, because a smaller one would cut into TRL's clip
            range; None for none.
        ratio_level: TRL's importance_sampling_level, also of the ratio that weighs the
            KL.
        threshold: in nats per token; TRL's off_policy_mask_threshold, of the KL from
            the proximal policy. TRL measures from the sampler, which is the same if
            sampler and trainer agree. None for no mask.
        quantile: in [0, 1], share of the tokens of lowest entropy that get no policy
            loss; 1 minus TRL's top_entropy_quantile. They still count in the mean.
        reduction: `reduce.sequence_mean_of_token_mean` for loss_type grpo.
        **shared: see `SharedOptions`; they override TRL's own.

    Raises:
        ValueError: a hyperparameter is out of its range; a dual clip is given with
            sequence ratios; or an entropy coefficient with a quantile, or with a
            reduction other than the mean over tokens: TRL's entropy is a mean over the
            chosen tokens with every loss type.

    >>> trl_grpo(ratio_level="sequence", kl_coefficient=0.04).needs_reference
    True
    """
    _check_trl(clip_high, dual_clip, reduction, shared)
    weight = shared.get("entropy_coefficient", 0.0)
    if quantile and weight:
        raise ValueError(
            f"entropy_coefficient must be 0 with a quantile, got {weight}; TRL's "
            "entropy is a mean over the chosen tokens, which has another denominator"
        )
    policy_loss = _trl_clip(clip_low, clip_high, dual_clip, ratio_level)
    if threshold is not None:
        policy_loss = terms.opsm(policy_loss, threshold=threshold)
    choice = partial(entropy.entropy_quantile_mask, quantile=quantile)
    own = SharedOptions(kl_weights=kl_weights.ratio(ratio_level=ratio_level))
    return compose(
        advantages=TRL.normalized,
        policy_loss=policy_loss,
        reduction=reduction,
        token_choice=choice if quantile else None,
        **(TRL.shared | own | only_shared(trl_grpo, shared)),
    )


def _trl_clip(
    clip_low: float, clip_high: float, dual_clip: float | None, ratio_level: str
) -> PolicyLoss:
    """TRL's clipped surrogate, of tokens or of sequences."""
    if ratio_level == "token":
        return terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        )
    if ratio_level != "sequence":
        raise ValueError(
            f"ratio_level must be 'token' or 'sequence', got {ratio_level!r}"
        )
    if dual_clip is not None:
        raise ValueError(
            f"dual_clip must be None with ratio_level 'sequence', got {dual_clip}"
        )
    return terms.clipped_sequence_ratio(
        clip_low=clip_low, clip_high=clip_high, by_token=False
    )


def _check_trl(
    clip_high: float,
    dual_clip: float | None,
    reduction: Reduction,
    shared: SharedOptions,
) -> None:
    """Refuses options that TRL computes differently."""
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(
            f"dual_clip must be > 1 + clip_high = {1 + clip_high}, got {dual_clip}"
        )
    weight = shared.get("entropy_coefficient", 0.0)
    if weight and reduction is not reduce.token_mean:
        raise ValueError(
            f"entropy_coefficient must be 0 with this reduction, got {weight}; TRL's "
            "entropy is a mean over tokens, which has another denominator"
        )
