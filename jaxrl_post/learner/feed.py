"""From examples to batches with all that an objective reads beside the tokens."""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.packed import Examples, packed
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.reference import Reference
from jaxrl_post.learner.step import ObjectiveFn
from jaxrl_post.types import PyTree, TokenBatch

__all__ = ["Drawn", "Feed", "Measured"]


@dataclass(frozen=True)
class Measured:
    """What is measured of a step as a whole, before the loss of its parts.

    Attributes:
        examples: beside those that are learned from, one for each.
        objective: whose mean over them goes into the `values` of the step's batch.
    """

    examples: Examples
    objective: ObjectiveFn


@dataclass(frozen=True)
class Drawn:
    """Packed examples with reference log-probs, and what is measured beside them."""

    batch: TokenBatch
    measured: TokenBatch | None


@dataclass(frozen=True)
class Feed:
    """Batches of a data set, for a learner.

    Attributes:
        examples: to learn from.
        measured: beside them; None for an objective that asks for nothing.
        tokenizer: of the model.
        row_tokens: length of a packed row.
        learner: gives the policy and the size of a microbatch.
        reference: scores the batches; None for an objective that needs none.
    """

    examples: Examples
    measured: Measured | None
    tokenizer: Tokenizer
    row_tokens: int
    learner: Learner
    reference: Reference | None

    def draw(self, split: Split, indices: Iterable[int]) -> Drawn:
        """Packs examples.

        Raises:
            ConfigError: as the data set's `encode`.
        """
        indices = list(indices)
        batch = self._packed(self.examples, split, indices)
        if self.measured is None:
            return Drawn(batch, None)
        return Drawn(batch, self._packed(self.measured.examples, split, indices))

    def scored(self, drawn: Drawn) -> Drawn:
        """With the reference's log-probs, which no step changes."""
        measured = None if drawn.measured is None else self._scored(drawn.measured)
        return Drawn(self._scored(drawn.batch), measured)

    def ready(self, params: PyTree, drawn: Drawn) -> TokenBatch:
        """With what is measured under the parameters of a step's beginning."""
        if drawn.measured is None:
            return drawn.batch
        # Sums over all microbatches: the mean does not depend on their size.
        mean = self._gauge.evaluate(params, drawn.measured)["loss"]
        point = np.full(drawn.batch.shape, mean, np.float32)
        return drawn.batch.replace(reference_point=point)  # type: ignore[attr-defined]

    @functools.cached_property
    def _gauge(self) -> Learner:
        assert self.measured is not None
        return dataclasses.replace(self.learner, objective=self.measured.objective)

    def _packed(
        self, examples: Examples, split: Split, indices: list[int]
    ) -> TokenBatch:
        return packed(
            examples,
            self.tokenizer,
            split,
            indices,
            row_tokens=self.row_tokens,
            row_multiple=self.learner.microbatch_rows,
        )

    def _scored(self, batch: TokenBatch) -> TokenBatch:
        if self.reference is None:
            return batch
        predicted = self.reference.scorer.predict(self.reference.params, batch)
        return batch.replace(reference_logprobs=predicted.logprobs)  # type: ignore[attr-defined]
