"""Divides the sequences of a step into packed minibatches."""

import itertools
from collections.abc import Sequence as Collection

import numpy as np

from jaxrl_post.data.packing.rows import pack_microbatches
from jaxrl_post.data.packing.sharing import by_context, trees
from jaxrl_post.data.packing.units import Sequence, Unit, num_tokens
from jaxrl_post.types import TokenBatch

__all__ = ["pack_minibatches"]


def pack_minibatches(
    sequences: Collection[Sequence],
    count: int,
    *,
    seed: Collection[int],
    shares: bool,
    microbatch_tokens: int,
    rows: int,
    kept_ids: int = 0,
) -> tuple[list[TokenBatch], dict[str, float]]:
    """Splits sequences into packed minibatches, in a random order if there are several.

    Args:
        sequences: of a step.
        count: minibatches, >= 1; fewer if there are fewer sequences.
        seed: of the order.
        shares: whether what sequences have in common stands once, in trees.
        microbatch_tokens: as for `pack_microbatches`.
        rows: as for `pack_microbatches`.
        kept_ids: as for `pack_microbatches`.

    Returns:
        NumPy arrays [microbatches * rows, length] of each minibatch, all of one length;
        and metrics of packing: the tokens that trees save, and those that splits
        repeat.
    """
    count = min(count, max(len(sequences), 1))
    if count > 1:
        # Sequences that are packed together also share a minibatch, except at the
        # borders: minibatches have equally many sequences.
        shared = by_context(sequences) if shares else [[each] for each in sequences]
        order = np.random.default_rng([*seed]).permutation(len(shared))
        sequences = [sequence for i in order for sequence in shared[i]]
    borders = [len(sequences) * i // count for i in range(count + 1)]
    parts = [sequences[first:last] for first, last in itertools.pairwise(borders)]
    units: list[Collection[Unit]] = [trees(part) if shares else part for part in parts]
    size = microbatch_tokens, rows
    batches = [pack_microbatches(part, *size, kept_ids=kept_ids) for part in units]
    # Credit reads all minibatches as one array.
    longest = max(batch.shape[1] for batch in batches)
    batches = [
        batch
        if batch.shape[1] == longest
        else pack_microbatches(part, *size, kept_ids=kept_ids, least=longest)
        for batch, part in zip(batches, units, strict=True)
    ]
    whole = sum(map(num_tokens, sequences))
    distinct = sum(num_tokens(each) for part in units for each in part)
    used = sum(int(np.count_nonzero(batch.ends)) for batch in batches)
    return batches, {
        "packing/shared": 1 - used / max(whole, 1),
        "packing/repeated_tokens": float(used - distinct),
    }
