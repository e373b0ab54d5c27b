"""Pytrees and annotation names that every layer shares.

Alignment: every per-token array of a `TokenBatch` is aligned to the token that it
describes. `behavior_logprobs[r, t]` is the log-probability of `tokens[r, t]` given the
tokens before it, and `loss_mask[r, t]` says whether the policy produced `tokens[r, t]`.
The first token of a sequence has no predecessor, so its mask is always False.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
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


class Album(tuple):
    """Pictures that stay in memory with a batch; equal to itself alone."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rotations"], meta_fields=["album"]
)
@dataclasses.dataclass(frozen=True)
class PackedPictures:
    """Pictures in packed rows, on the host.

    Attributes:
        rotations: int32, positions in time, row and column
            (`pictures.positions.rotary_positions`).
        album: keeps the pictures in memory; rows may have some of them.
    """

    rotations: Int[HostOrDevice, "rows length 3"]
    album: Album


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Packed token sequences, with the per-token arrays that training needs.

    A row is a forest of sequences in depth-first order. What sequences share, such as
    the prompt of a group of samples, stands in the row once, before what follows it. A
    sequence without anything shared is a tree of one node. The tokens that a token sees
    are those on its path from the root of its tree.

    `ends` says all of it: the token at index i sees that at index j exactly if
    j <= i < ends[j]. As a segment id for the functions of `losses`, it tells the
    sequences of a row apart: a node has the number of its last child, and the leaves
    have numbers of their own. Shared tokens that are trained on therefore count as
    their last child's, from which other children may part them.

    Attributes:
        tokens: int32 [rows, length], ids in [0, vocab_size).
        positions: int32 [rows, length], 0-based along the path.
        ends: int32 [rows, length]: one past the last token of the tokens that follow
            this one, in all branches; 0 is padding.
        loss_mask: bool [rows, length], True where the policy produced the token.
        advantages: float32 [rows, length], constant with respect to the parameters.
        behavior_logprobs: float32 [rows, length], the sampler's, in nats; with
            `kept`, those among the kept tokens.
        proximal_logprobs: float32 [rows, length] or None: log-probabilities under the
            parameters at the start of this batch's updates. None in an objective means
            that the batch gets one update, so that they equal the policy's own; None
            in `Algorithm.credit` that no token is stale, so that they are
            `behavior_logprobs`, up to the sampler's rounding.
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
            algorithms with `Algorithm.credit`. None means that a sequence's reward
            stands in `advantages` and is earned at its last token.
        stale: bool [rows, length] or None: True for tokens sampled by older parameters
            than those at the start of this batch's updates. `mismatch/` metrics leave
            them out, because their log-probs differ by design. None: no such tokens.
        truncated: bool [rows, length] or None: True at the last token of a
            sequence whose end was cut off.
        bootstrap: float32 [rows, length] or None: the critic's value after that token,
            0 elsewhere.
        reference_point: float32 [rows, length] or None: the reference point of KTO
            (`algorithms.unpaired`), the same at every token, in nats.
        labels: float32 [rows, length] or None: what an example says of its answer at
            each of its tokens: 1 for desirable or chosen, -1 for undesirable (KTO) or
            rejected; or of a step at its judged token, from 0 for wrong to 1 for right
            (process rewards); or its outcome, from 0 for wrong to 1 for right (implicit
            process rewards).
        margins: float32 [rows, length] or None: how far the reward of a chosen answer
            should be above the reward of the rejected one, at the chosen answer's
            tokens.
        prm_logprobs: float32 [rows, length] or None, under the implicit reward model.
        answers: int32 [rows, length] or None: number of the token's answer in the
            step, from 1; 0 for tokens of none. An answer is an episode, or a player's
            part in one.
        groups: int32 [rows, length] or None: number of the token's group in the step,
            from 1; 0 for tokens of none.
        pictures: of the tokens with negative numbers, or None: `PackedPictures` on the
            host; on devices `models.vision.RowPictures`, and those tokens then have the
            model's id of image tokens.
        kept: int32 [rows, length, most] or None: ids of the tokens among which a token
            was drawn, itself one of them, padded with -1; the policy's log-prob is that
            among them. Without ids, or with None, it is that among all tokens.
        experts: int16 [rows, length, layers, chosen] or None: the experts of the token
            in the sampler, as `models.RouterInputs` has them; -1 where they are not
            known.
    """

    tokens: Int[HostOrDevice, "rows length"]
    positions: Int[HostOrDevice, "rows length"]
    ends: Int[HostOrDevice, "rows length"]
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
    bootstrap: Float[HostOrDevice, "rows length"] | None = None
    reference_point: Float[HostOrDevice, "rows length"] | None = None
    labels: Float[HostOrDevice, "rows length"] | None = None
    margins: Float[HostOrDevice, "rows length"] | None = None
    prm_logprobs: Float[HostOrDevice, "rows length"] | None = None
    answers: Int[HostOrDevice, "rows length"] | None = None
    groups: Int[HostOrDevice, "rows length"] | None = None
    kept: Int[HostOrDevice, "rows length most"] | None = None
    pictures: Any = None
    experts: Int[HostOrDevice, "rows length layers chosen"] | None = None

    replace = dataclasses.replace

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, length)."""
        return self.tokens.shape

    @property
    def previous(self) -> Int[Array, "rows length"]:
        """The index in its row of the token before each token on its path.

        0 at a path's first token, which has none, and for padding.

        >>> import numpy as np
        >>> prompt_and_two_answers = np.array([[6, 6, 4, 4, 6, 6, 0]], np.int32)
        >>> previous_tokens(prompt_and_two_answers).tolist()
        [[0, 0, 1, 2, 1, 4, 0]]
        """
        return previous_tokens(self.ends)


@jax.jit
def previous_tokens(
    ends: Int[HostOrDevice, "rows length"],
) -> Int[Array, "rows length"]:
    """Returns `TokenBatch.previous` from `TokenBatch.ends`."""
    index = jnp.arange(ends.shape[1], dtype=jnp.int32)
    # The last token before each token, among those that it sees. The square of the
    # length is compared, but never stored.
    before = index[None, :] < index[:, None]
    seen = before & (jnp.asarray(ends)[:, None, :] > index[:, None])
    return jnp.where(seen, index, 0).max(axis=-1)


def rows(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    """Returns the rows [start, stop) of a batch, as views where the arrays allow it."""
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)
