"""The head of a model in exact mode: logits and log-probs of rows of hidden states.

A row's bits depend on the row alone; see `models.exact`. The sampler has logits in
memory, from which it draws; the trainer calls `token_logprob` with the same functions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.token_logprob.rows import RowLogits, logit_rows, logprob_rows
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import logits_of, unembedding
from jaxrl_post.models.params import DecoderParams
from jaxrl_post.models.rows import CountedRows
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["ExactHead"]


class ExactHead(NamedTuple):
    """The head of a model, from final hidden states to log-probs.

    Attributes:
        params: as in `exact_forward`.
        config: the model's config.
        tile: rows of a tile.
        rules: as in `forward`.
    """

    params: DecoderParams[Array]
    config: ModelConfig
    tile: int
    rules: Rules = DEFAULT_RULES

    @property
    def row_logits(self) -> RowLogits:
        """Logits of a tile, before the temperature."""
        return functools.partial(logits_of, self.config)

    def logits(
        self,
        hidden: Float[Array, "rows hidden"],
        scale: Float[Array, " rows"],
        counted: Bool[Array, " rows"],
    ) -> Float[Array, "rows vocab"]:
        """Float32 logits times `scale`.

        Args:
            hidden: final hidden states.
            scale: float32, 1 over the temperature.
            counted: False for rows that are not computed, which get 0.
        """

        def local(
            axes: tuple[str, ...],
            weight: Array,
            hidden: Array,
            scale: Array,
            counted: Array,
        ) -> Array:
            rows = CountedRows.of(counted, self.tile)
            arrays = rows.take(hidden), rows.take(scale)
            arrays = (*arrays, rows.count, self.tile)
            return rows.put(logit_rows(self.row_logits, weight, *arrays))

        return self._run(local, (hidden, scale, counted), by_column=())

    def logprobs(
        self,
        logits: Float[Array, "rows vocab"],
        targets: Int[Array, " rows"],
        counted: Bool[Array, " rows"],
        kept: Int[Array, "rows kept"] | None = None,
    ) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
        """Log-probs of tokens under softmax(logits), and logs of the kept mass.

        Args:
            logits: of the method of this name.
            targets: int32 ids.
            counted: False for rows that are not computed, which get 0.
            kept: as in `token_logprob`; the second result is 0 without ids.
        """

        def local(
            axes: tuple[str, ...],
            weight: Array,
            logits: Array,
            targets: Array,
            counted: Array,
            kept: Array | None,
        ) -> tuple[Array, Array]:
            rows = CountedRows.of(counted, self.tile)
            logits, targets, kept = jax.tree.map(rows.take, (logits, targets, kept))
            found = logprob_rows(logits, targets, rows.count, self.tile, axes, kept)
            return rows.put(found[0]), rows.put(found[2])

        arrays = (logits, targets, counted, kept)
        return self._run(local, arrays, by_column=(0,))

    def _run(
        self,
        local: Callable[..., Any],
        arrays: tuple[Array | None, ...],
        by_column: tuple[int, ...] | None = None,
    ) -> Any:
        """Calls a function of a device's rows and its columns of the vocabulary.

        Args:
            local: from mesh axes of the vocabulary, weight and arrays.
            arrays: [rows, ...] each, or None; the first is one.
            by_column: which of them have a dim of the vocabulary; () if the result has.
        """
        weight = unembedding(self.params)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return local((), weight, *arrays)
        rules = self.rules
        assert arrays[0] is not None
        batch = dividing_axes("batch", arrays[0].shape[0], mesh, rules)
        vocab = dividing_axes("vocab", weight.shape[0], mesh, rules)
        both = P(batch, vocab)
        return on_parts(
            functools.partial(local, vocab),
            in_specs=(
                P(vocab),
                *(
                    both if by_column and i in by_column else P(batch)
                    for i in range(len(arrays))
                ),
            ),
            out_specs=both if by_column == () else P(batch),
        )(weight, *arrays)
