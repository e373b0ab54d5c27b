"""Batches that the tests of algorithms share."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.types import TokenBatch
from tests.packed_rows import ends_of

LENGTHS = [6, 3, 5, 2, 4, 6]


def ragged(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Six sequences with everything a batch needs; prompts of one or two tokens.

    The fourth is all prompt, so that it must not count as a sequence.
    """
    rng = np.random.default_rng(seed)
    sequences = []
    for index, length in enumerate(LENGTHS):
        proximal = -rng.gamma(2.0, 0.5, length)
        sequences.append(
            {
                "tokens": rng.integers(0, 99, length),
                "positions": np.arange(length),
                "ends": np.ones(length, int),
                "loss_mask": np.arange(length) >= 1 + index % 2,
                "advantages": np.full(length, rng.normal()),
                "behavior_logprobs": proximal + rng.normal(0, 0.4, length),
                "versions": np.zeros(length, int),
                "proximal_logprobs": proximal,
                "reference_logprobs": proximal + rng.normal(0, 0.5, length),
                "policy_logprobs": proximal + rng.normal(0, 0.3, length),
            }
        )
    return sequences


def rows_of(rows, width, uncounted=0.0) -> tuple[jnp.ndarray, TokenBatch]:
    """Lays each row's sequences side by side; `uncounted` fills masked floats."""
    fields = {name: [] for name in rows[0][0]}
    for row in rows:
        for name, laid in fields.items():
            parts = [np.asarray(sequence[name]) for sequence in row]
            if name == "ends":
                parts = [part * (i + 1) for i, part in enumerate(parts)]
            joined = np.concatenate(parts)
            laid.append(np.pad(joined, (0, width - len(joined))))
    arrays = {name: np.stack(laid) for name, laid in fields.items()}
    arrays["ends"] = ends_of(arrays["ends"]).astype(np.int64)
    for name, array in arrays.items():
        if array.dtype == np.float64:
            filled = np.where(arrays["loss_mask"], array, uncounted)
            arrays[name] = filled.astype(np.float32)
        elif array.dtype == np.int64:
            arrays[name] = array.astype(np.int32)
    arrays = {name: jnp.array(array) for name, array in arrays.items()}
    policy_logprobs = arrays.pop("policy_logprobs")
    return policy_logprobs, TokenBatch(**arrays)


@pytest.fixture(scope="session")
def sequences():
    return ragged()


@pytest.fixture(scope="session")
def lay_out():
    return rows_of


@pytest.fixture(scope="session")
def unpacked(sequences):
    """(policy_logprobs, batch) with one sequence a row."""
    return rows_of([[sequence] for sequence in sequences], width=6)
