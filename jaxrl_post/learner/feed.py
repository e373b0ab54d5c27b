"""Packs examples into batches with all inputs of an objective."""

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
    """A measurement over a whole step's batch, taken before its loss (as in KTO).

    Attributes:
        examples: the examples to measure, one for each training example.
        objective: the objective whose mean becomes the batch's `reference_point`.
    """

    examples: Examples
    objective: ObjectiveFn


@dataclass(frozen=True)
class Drawn:
    """The packed examples of a step, and the packed examples to measure."""

    batch: TokenBatch
    measured: TokenBatch | None


@dataclass(frozen=True)
class Feed:
    """Makes a learner's batches from a data set.

    Attributes:
        examples: the training examples.
        measured: the measurement that the objective needs, or None.
        tokenizer: the model's tokenizer.
        microbatch_tokens: most tokens of a microbatch, padding included.
        learner: gives the policy and the rows of a microbatch.
        reference: scores the batches; None if the objective needs no reference.
        trees: whether examples that begin alike share that (`packing.trees`).
    """

    examples: Examples
    measured: Measured | None
    tokenizer: Tokenizer
    microbatch_tokens: int
    learner: Learner
    reference: Reference | None
    trees: bool = True

    def draw(self, split: Split, indices: Iterable[int]) -> Drawn:
        """Packs the examples of a step.

        Raises:
            ConfigError: as the data set's `encode`.
        """
        indices = list(indices)
        batch = self._packed(self.examples, split, indices)
        if self.measured is None:
            return Drawn(batch, None)
        return Drawn(batch, self._packed(self.measured.examples, split, indices))

    def scored(self, drawn: Drawn) -> Drawn:
        """Adds the log-probs of the reference as it is now."""
        measured = None if drawn.measured is None else self._scored(drawn.measured)
        return Drawn(self._scored(drawn.batch), measured)

    def ready(self, params: PyTree, drawn: Drawn) -> TokenBatch:
        """Adds the measurement under `params`, from the beginning of a step."""
        if drawn.measured is None:
            return drawn.batch
        # `evaluate` adds sums over microbatches, so their size does not matter.
        mean = self._gauge.evaluate(params, drawn.measured)["loss"]
        point = np.full(drawn.batch.shape, mean, np.float32)
        return drawn.batch.replace(reference_point=point)  # type: ignore[attr-defined]

    def texts(self, drawn: Drawn | None) -> list[dict[str, str]]:
        """The packed rows of a step as texts: whole, and what is trained on.

        Args:
            drawn: of the step; None for no rows.
        """
        batch = None if drawn is None else drawn.batch
        if batch is None:
            return []
        read = functools.partial(self.tokenizer.decoded, special=True)
        found = list[dict[str, str]]()
        for ids, ends, mask in zip(
            np.asarray(batch.tokens),
            np.asarray(batch.ends),
            np.asarray(batch.loss_mask),
            strict=True,
        ):
            whole, trained = ids[ends > 0].tolist(), ids[mask].tolist()
            found.append({"row": read(whole), "trained": read(trained)})
        return found

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
            microbatch_tokens=self.microbatch_tokens,
            rows=self.learner.microbatch_rows,
            trees=self.trees,
        )

    def _scored(self, batch: TokenBatch) -> TokenBatch:
        if self.reference is None:
            return batch
        logprobs = self.reference.predict(batch).logprobs
        return batch.replace(reference_logprobs=logprobs)  # type: ignore[attr-defined]
