"""Pytrees and annotation names that every layer shares.

Alignment: every per-token array of a `TokenBatch` is aligned to the token that it
describes. `behavior_logprobs[r, t]` is the log-probability of `tokens[r, t]` given the
tokens before it, and `loss_mask[r, t]` says whether the policy produced `tokens[r, t]`.
The first token of a segment has no predecessor, so its mask is always False.
"""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import jax
from flax import struct
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Key, Num, UInt
else:
    try:
        from jaxtyping import Bool, Float, Int, Key, Num, UInt
    except ModuleNotFoundError:
        # jaxtyping is part of the `dev` extra, and losses must import in trainers that
        # do not have it. `described` still needs the kind and the dimensions.
        class _Annotation:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return Annotated[item[0], Described(cls.__name__, item[1])]

        class Bool(_Annotation): ...

        class Float(_Annotation): ...

        class Int(_Annotation): ...

        class Key(_Annotation): ...

        class Num(_Annotation): ...

        class UInt(_Annotation): ...


__all__ = [
    "Array",
    "Bool",
    "Described",
    "Float",
    "HostOrDevice",
    "Int",
    "Key",
    "Num",
    "PyTree",
    "TokenBatch",
    "UInt",
    "described",
]


class Described(NamedTuple):
    """The dtype kind and the dimension names in an array's annotation.

    Attributes:
        kind: "Bool", "Float", "Int", "Key", "Num" or "UInt".
        dims: names of the dimensions, "*batch length" for example.
    """

    kind: str
    dims: str


def described(annotation: Any) -> Described | None:
    """Reads the annotation of an array, with jaxtyping or without it.

    Args:
        annotation: the annotation of an argument or a field.

    Returns:
        Kind and dimensions; None if the annotation describes no array.

    >>> described(Float[Array, "*batch length"])
    Described(kind='Float', dims='*batch length')
    >>> described(float) is None
    True
    """
    dims = getattr(annotation, "dim_str", None)
    if dims is not None:
        return Described(annotation.dtype.__name__, dims)
    return next((a for a in get_args(annotation) if isinstance(a, Described)), None)


# Not a `type` statement, with which beartype could not resolve `PyTree | None`.
PyTree = Any

# jax.Array or numpy.ndarray: a batch is built on the host and placed on the devices
# once. A union type would force every user of a batch to narrow it, with no benefit.
HostOrDevice = Any


@struct.dataclass
class TokenBatch:
    """Packed token sequences, with the per-token arrays that training needs.

    Several sequences ("segments") may lie side by side in a row; attention, positions
    and sequence-level losses never cross a segment's border.

    Attributes:
        tokens: int32 [rows, length], ids in [0, vocab_size).
        positions: int32 [rows, length], 0-based within the segment.
        segment_ids: int32 [rows, length]; 0 is padding, 1.. number the row's segments.
        loss_mask: bool [rows, length], True where the policy produced the token.
        advantages: float32 [rows, length], constant with respect to the parameters.
        behavior_logprobs: float32 [rows, length], the sampler's, in nats.
        proximal_logprobs: float32 [rows, length] or None: log-probabilities under the
            parameters at the start of this batch's updates. None means that the batch
            gets one update, so that they equal the policy's own.
        reference_logprobs: float32 [rows, length] or None, under the reference policy.
        values_before: float32 [rows, length] or None: the critic's value before the
            token, by the parameters at the start of this batch's updates. It equals
            `Predictions.values_after` at the previous token.
        returns: float32 [rows, length] or None: the critic's targets.
        versions: int32 [rows, length], version of the parameters that sampled the token
            (-1 where the policy did not produce it).
        raw_advantages: float32 [rows, length] or None: advantages before whitening, for
            metrics.
        token_rewards: float32 [rows, length] or None: one reward per token, for
            algorithms with `Algorithm.credit`. None means that a segment's reward
            stands in `advantages` and is earned at its last token.
        stale: bool [rows, length] or None: True for tokens sampled by older parameters
            than those at the start of this batch's updates. `mismatch/` metrics leave
            them out, because their log-probs differ by design. None: no such tokens.
        truncated: bool [rows, length] or None: True at the last token of a segment
            whose end was cut off.
        reference_point: float32 [rows, length] or None: the reference point of KTO
            (`algorithms.unpaired`), the same at every token, in nats.
        labels: float32 [rows, length] or None: what an example says of its answer at
            each of its tokens, 1 for desirable and -1 for undesirable (KTO); or of a
            step at its judged token, from 0 for wrong to 1 for right (process rewards).
        margins: float32 [rows, length] or None: how far the reward of a chosen answer
            should be above that of the rejected one, at the chosen answer's tokens.
    """

    tokens: Int[HostOrDevice, "rows length"]
    positions: Int[HostOrDevice, "rows length"]
    segment_ids: Int[HostOrDevice, "rows length"]
    loss_mask: Bool[HostOrDevice, "rows length"]
    advantages: Float[HostOrDevice, "rows length"]
    behavior_logprobs: Float[HostOrDevice, "rows length"]
    versions: Int[HostOrDevice, "rows length"]
    proximal_logprobs: Float[HostOrDevice, "rows length"] | None = None
    reference_logprobs: Float[HostOrDevice, "rows length"] | None = None
    values_before: Float[HostOrDevice, "rows length"] | None = None
    returns: Float[HostOrDevice, "rows length"] | None = None
    raw_advantages: Float[HostOrDevice, "rows length"] | None = None
    token_rewards: Float[HostOrDevice, "rows length"] | None = None
    stale: Bool[HostOrDevice, "rows length"] | None = None
    truncated: Bool[HostOrDevice, "rows length"] | None = None
    reference_point: Float[HostOrDevice, "rows length"] | None = None
    labels: Float[HostOrDevice, "rows length"] | None = None
    margins: Float[HostOrDevice, "rows length"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, length)."""
        return self.tokens.shape


def rows(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    """Returns the rows [start, stop) of a batch, as views where the arrays allow it."""
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)
