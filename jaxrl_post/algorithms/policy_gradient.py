"""Policy-gradient algorithms that estimate advantages from groups of samples.

Each composes an advantage, a policy term and a reduction; `variants` has more of them,
and `dialects` has the versions of other frameworks:

    name     advantage        ratio     clip                 loss is the mean over
    grpo     group, over std  token     1 -+ 0.2             tokens, then sequences
    dr_grpo  group, centred   token     1 -+ 0.2             sequences, of token sum / C
    dapo     group, over std  token     1 - 0.2, 1 + 0.28    all tokens
    gspo     group, over std  sequence  1 - 3e-4, 1 + 4e-4   tokens, then sequences
    cispo    group, over std  token     [0, 5], no gradient  all tokens
    rloo     leave-one-out    none      none                 sequences, of token sum
"""

from functools import partial
from typing import Unpack

from jaxrl_post.algorithms import terms
from jaxrl_post.algorithms.composition import SharedOptions, compose, only_shared
from jaxrl_post.algorithms.objective import Algorithm
from jaxrl_post.losses import advantages, reduce

__all__ = ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "rloo"]


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Group Relative Policy Optimization.

    Rewards are normalised in their group. PPO's clipped surrogate is averaged over each
    sequence's tokens, then over sequences. The paper's KL coefficient is 0.04.

    References:
        Shao et al., DeepSeekMath, arXiv:2402.03300.

    >>> grpo(kl_coefficient=0.04).needs_reference
    True
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        ),
        reduction=reduce.sequence_mean_of_token_mean,
        **only_shared(grpo, shared),
    )


def dr_grpo(
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """GRPO done right: without the divisions that bias it.

    Rewards are centred but not divided by their group's standard deviation, and each
    sequence's token sum is divided by a constant instead of its length.

    Args:
        denominator: > 0, in tokens; the paper takes the generation budget. It scales
            the loss, so it has no default.

    References:
        Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783.

    >>> dr_grpo(denominator=1024.0).needs_reference
    False
    """
    return compose(
        advantages=advantages.group_centered,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=partial(reduce.constant_denominator, denominator=denominator),
        **only_shared(dr_grpo, shared),
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """The loss of Decoupled Clip and Dynamic sAmpling Policy Optimization.

    It is GRPO with a higher upper clip, the mean over all tokens, and no KL. The
    paper's dynamic sampling and overlong shaping are not part of the loss.

    References:
        Yu et al., DAPO, arXiv:2503.14476.

    >>> dapo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        **only_shared(dapo, shared),
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Group Sequence Policy Optimization.

    It is GRPO with one clipped ratio per sequence, the geometric mean of its tokens'
    ratios, which needs a small clip range. Advantages and corrections of single tokens
    count for these alone (the paper's GSPO-token, eq. 13); where they are equal in a
    sequence, its gradient is the gradient of eq. 5.

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071.

    >>> gspo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.clipped_sequence_ratio(
            clip_low=clip_low, clip_high=clip_high
        ),
        reduction=reduce.sequence_mean_of_token_mean,
        **only_shared(gspo, shared),
    )


def cispo(
    *,
    ratio_low: float = 0.0,
    ratio_high: float = 5.0,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Clipped Importance-Sampling Policy Optimization.

    It is REINFORCE with each token weighted by its clipped ratio, and the mean over all
    tokens. The paper sets no lower bound and tunes the upper bound without reporting
    it; others use 5, which is wide. For PPO's range pass 0.8 and 1.2.

    Args:
        ratio_low: in [0, 1], lower bound of the ratio itself.
        ratio_high: >= 1, upper bound of the ratio itself; see `policy.cispo`.

    References:
        MiniMax, MiniMax-M1, arXiv:2506.13585.

    >>> cispo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.weighting_token_ratio(
            ratio_low=ratio_low, ratio_high=ratio_high
        ),
        reduction=reduce.token_mean,
        **only_shared(cispo, shared),
    )


def rloo(**shared: Unpack[SharedOptions]) -> Algorithm:
    """REINFORCE with a leave-one-out baseline.

    It is the unclipped likelihood gradient of whole sequences: each sequence's token
    sum, averaged over sequences. No ratio corrects for several updates on a batch. The
    paper puts the KL into the reward; here it is a term of the loss.

    References:
        Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization for
        Learning from Human Feedback in LLMs, arXiv:2402.14740.

    >>> rloo().needs_reference
    False
    """
    return compose(
        advantages=advantages.leave_one_out,
        policy_loss=terms.reinforce(),
        reduction=reduce.sequence_mean_of_token_sum,
        **only_shared(rloo, shared),
    )._replace(has_ratio=False)
