"""Units of packing: sequences, and trees of them."""

from collections.abc import Sequence as Collection
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_post.tokens import Tokens

__all__ = ["OPTIONAL", "Sequence", "Tree", "Unit", "num_tokens"]

# Arrays of a sequence that may be missing, and their names in a batch.
OPTIONAL = {
    "rewards": "token_rewards", "labels": "labels", "margins": "margins",
    "answers": "answers", "groups": "groups",
}  # fmt: skip


@dataclass(frozen=True)
class Sequence:
    """One sequence to train on; arrays have one entry per token, at least one.

    Attributes:
        tokens: ids, and the sampler's log-probs and versions; `tokens.sampled` is the
            loss mask.
        advantages: float32 [tokens].
        rewards: float32 [tokens], for algorithms that compute advantages per token;
            None for other algorithms.
        labels: float32 [tokens], as `TokenBatch.labels`; None without labels.
        margins: float32 [tokens], as `TokenBatch.margins`; None without margins.
        answers: int32 [tokens], as `TokenBatch.answers`; None for algorithms that do
            not read them.
        groups: int32 [tokens], as `TokenBatch.groups`; None without `answers`.
        truncated: whether the end was cut off; None if the algorithm does not need it.
    """

    tokens: Tokens
    advantages: np.ndarray
    rewards: np.ndarray | None = None
    labels: np.ndarray | None = None
    margins: np.ndarray | None = None
    answers: np.ndarray | None = None
    groups: np.ndarray | None = None
    truncated: bool | None = None

    def __post_init__(self) -> None:
        sizes = {"tokens": len(self.tokens), "advantages": len(self.advantages)}
        for name in OPTIONAL:
            if (array := getattr(self, name)) is not None:
                sizes[name] = len(array)
        if len(set(sizes.values())) > 1 or not len(self.tokens):
            raise ValueError(
                f"Sequence: all arrays must have one entry a token, at least one; "
                f"got {sizes}"
            )

    @property
    def ids(self) -> np.ndarray:
        """int32 token ids."""
        return self.tokens.ids

    @property
    def loss_mask(self) -> np.ndarray:
        """bool, True for the tokens that are trained on."""
        return self.tokens.sampled

    @classmethod
    def of(
        cls,
        prompt: Collection[int],
        completion: Collection[int],
        *,
        behavior_logprobs: Collection[float] | None = None,
        advantage: float = 0.0,
    ) -> "Sequence":
        """Makes a sequence of a masked prompt and a completion to train on."""
        after = len(completion)
        logprobs = [0.0] * after if behavior_logprobs is None else behavior_logprobs
        answer = Tokens.generated(list(completion), list(logprobs), version=0)
        advantages = np.full(len(prompt) + after, advantage, np.float32)
        advantages[: len(prompt)] = 0.0
        return cls(Tokens.context(prompt) + answer, advantages)

    def __getitem__(self, span: slice) -> "Sequence":
        arrays = {
            name: getattr(self, name)[span]
            for name in OPTIONAL
            if getattr(self, name) is not None
        }
        return replace(
            self, tokens=self.tokens[span], advantages=self.advantages[span], **arrays
        )


@dataclass(frozen=True)
class Tree:
    """A sequence and the branches that continue it, each in its own way.

    A token belongs to one node and is trained on once, with its node's advantage.
    Losses over sequences count the node's trained tokens in the sequence that continues
    in the last branch, then in that branch's last branch, to the end of the tree.

    Attributes:
        node: the tokens that all branches share.
        branches: what follows; branches in a tuple stay side by side in one row.

    >>> from jaxrl_post.data.packing import pack
    >>> question = Sequence.of([5, 6], [])
    >>> tree = Tree(question, (Sequence.of([], [7]), Sequence.of([], [8, 9])))
    >>> pack([tree], length=6, row_multiple=1).ends
    array([[5, 5, 3, 5, 5, 0]], dtype=int32)
    """

    node: Sequence
    branches: "tuple[Unit, ...]" = ()


# Unit that is packed into one row, or, if it is a tree, into as few as possible.
type Unit = Sequence | Tree | tuple[Sequence | Tree, ...]


def num_tokens(unit: Unit) -> int:
    """Number of a unit's tokens, each shared token counted once."""
    if isinstance(unit, Sequence):
        return len(unit.tokens)
    if isinstance(unit, Tree):
        return len(unit.node.tokens) + sum(map(num_tokens, unit.branches))
    return sum(map(num_tokens, unit))
