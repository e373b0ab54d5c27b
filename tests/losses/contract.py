"""Cases of the contract tests: one per function, on arrays of one batch."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.losses import reduce
from jaxrl_post.types import Array

ROWS = 8
# The arrays that say what counts; a case takes at most one of them.
MASKS = ("mask", "valid", "present", "step_mask", "turn_mask")


def example(seed=0, rows=3, length=6):
    """Log-probs of two policies, advantages, a mask and two segments with padding."""
    rng = np.random.default_rng(seed)
    p, q = (-rng.gamma(1.0, 1.0, (rows, length)) for _ in range(2))
    advantages, mask = rng.normal(size=(rows, length)), rng.random((rows, length)) < 0.6
    segment_ids = np.tile(np.array([1] * 3 + [2] * (length - 4) + [0]), (rows, 1))
    mask[:, 0], mask[:, -1] = True, False
    arrays = (jnp.array(x, jnp.float32) for x in (p, q, advantages))
    return *arrays, jnp.array(mask), jnp.array(segment_ids, jnp.int32)


def poisoned(arrays, mask, rotation):
    """The arrays with -inf, NaN and inf in turn wherever the mask is False."""
    bad = np.resize(np.roll([-np.inf, np.nan, np.inf], rotation), mask.shape)
    return [jnp.where(mask, x, jnp.array(bad, x.dtype)) for x in arrays]


@cache
def batch(seed: int = 0) -> Mapping[str, Array]:
    """Every array of the table: the first dim is the batch, ROWS long.

    Tokens are [ROWS, 6], entries of a token [ROWS, 6, 2], logits [ROWS, 6, 5], pairs
    [ROWS], groups [ROWS, 4], their steps [ROWS, 4, 6].
    """
    return _tokens(seed) | _pairs(seed) | _groups(seed) | _scalars(seed)


def _tokens(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed + 1)
    p, q, a, mask, ids = example(seed, rows=ROWS)
    # On the bounds of the cases, which rounding to 16 bits moves to either side.
    a, mask = a.at[0, :2].set(jnp.array([1.0, -1.0])), mask.at[0, :2].set(True)
    on_bounds = {
        "ratio": jnp.exp(p - q).at[0, :2].set(jnp.array([1.2, 0.8])),
        "distance": jnp.abs(p - q).at[0, :2].set(0.2),
    }
    shape = (ROWS, 6)
    prompts = jnp.array(rng.integers(0, 3, shape), jnp.int32)
    counts = reduce.prompt_token_counts(prompts, mask, num_prompts=3)
    logits = rng.normal(size=(2, *shape, 5)) * 2
    teacher, student = (jnp.array(x, jnp.float32) for x in logits)
    top, top_ids = jax.lax.top_k(jax.nn.log_softmax(teacher), 2)
    return on_bounds | {
        "p": p,
        "q": q,
        "a": a,
        "mask": mask,
        "ids": ids,
        "unit": jnp.array(rng.uniform(0.1, 0.9, shape), jnp.float32),
        "versions": jnp.array(rng.integers(0, 4, shape), jnp.int32),
        "tokens": jnp.array(rng.integers(0, 2, shape), jnp.int32),
        "turns": jnp.array(rng.integers(0, 5, shape), jnp.int32),
        "prompts": prompts,
        # Two answers a row, which belong to two groups and have parts in other rows.
        "answers": jnp.where(ids > 0, ids + 2 * (jnp.arange(ROWS)[:, None] % 2), 0),
        "answer_groups": jnp.where(ids > 0, ids, 0),
        "prompt_tokens": counts,
        "teacher": teacher,
        "student": student,
        "top": top,
        "top_ids": top_ids,
        "p_top": jax.nn.log_softmax(student)[..., :2],
        "q_top": jax.nn.log_softmax(teacher)[..., :2],
    }


def _pairs(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed + 2)
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected", "margin")
    arrays = -rng.gamma(2.0, 1.0, (len(names), ROWS))
    arrays[-1] += 2.0
    return dict(zip(names, jnp.array(arrays, jnp.float32), strict=True)) | {
        "valid": jnp.array([True, False, True, True, False, True, True, False]),
        "desirable": jnp.arange(ROWS) % 2 == seed % 2,
        "lengths": jnp.array(rng.integers(0, 9, ROWS), jnp.int32),
    }


def _groups(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed + 3)
    present = jnp.array(rng.random((ROWS, 4)) < 0.7).at[:2].set(True)
    normal = partial(rng.normal, loc=0.5)
    return {
        "rewards": jnp.array(normal(size=(ROWS, 4)), jnp.float32),
        "greedy": jnp.array(normal(size=ROWS), jnp.float32),
        "components": jnp.array(normal(size=(ROWS, 4, 3)), jnp.float32),
        "present": present,
        "turn_mask": present,
        "sample_lengths": jnp.array(rng.integers(1, 9, (ROWS, 4)), jnp.int32),
        "step_rewards": jnp.array(normal(size=(ROWS, 4, 6)), jnp.float32),
        "step_ends": jnp.array(rng.random((ROWS, 4, 6)) < 0.5).at[:, 0].set(True),
        "step_mask": jnp.array(rng.random((ROWS, 4, 6)) < 0.8).at[0].set(True),
    }


def _scalars(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed + 4)
    coefficients, observed = rng.uniform(0.1, 0.9, (2, ROWS))
    return {
        "coefficient": jnp.array(coefficients, jnp.float32),
        "observed": jnp.array(observed, jnp.float32),
        "point": jnp.array(0.5 + seed, jnp.float32),
        "version": jnp.array(3 + seed, jnp.int32),
        "denominator": jnp.array(7.0 + seed, jnp.float32),
        "key": jax.random.key(seed),
    }


# Compared and hashed by identity, so that jit takes a case as it is.
@dataclass(frozen=True, eq=False)
class Case:
    """A function, its arrays, and what is to be expected of it.

    Attributes:
        function: what is called.
        takes: names in `batch`, in order; "keyword=name" for keyword arrays.
        keywords: hyperparameters.
        through: names of the arrays that the gradient goes through; the others must
            have none. None for a metric, which promises nothing.
        parts: what parts of the batch give. "rows": their rows of the whole batch's
            result. "sum": a sum's terms. "own": results of their own, because the
            function looks at all that it is given.
        of_part: further keywords where the batch is in parts (a device's, a row's).
        elsewhere: what a result in the mask's shape has where nothing counts; None for
            what the place's sequence or group has.
        dtype: of the result.
        nan: whether a NaN that counts shows in the result.
        covers: the public name, where `function` composes it with something.
        variant: tells apart cases of one function.
    """

    function: Callable[..., Any]
    takes: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    through: str | None = ""
    parts: Literal["rows", "sum", "own"] = "rows"
    of_part: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: float | None = 0.0
    dtype: Any = jnp.float32
    nan: bool = True
    covers: Any = None
    variant: str = ""

    @property
    def public_name(self) -> str:
        public = self.covers or self.function
        return f"{public.__module__.rpartition('.')[2]}.{public.__name__}"

    @property
    def name(self) -> str:
        return (
            f"{self.public_name}[{self.variant}]" if self.variant else self.public_name
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.rpartition("=")[2] for name in self.takes.split())

    @property
    def parameters(self) -> dict[str, str]:
        """The function's own names of the arrays, by name in `batch`."""
        positional = iter(inspect.signature(self.function).parameters)
        keywords = [name.rpartition("=")[0] for name in self.takes.split()]
        named = [keyword or next(positional) for keyword in keywords]
        return dict(zip(self.names, named, strict=True))

    @property
    def mask(self) -> str | None:
        return next((name for name in self.names if name in MASKS), None)

    def __call__(self, arrays: Mapping[str, Array | None], **more: Any) -> Any:
        arguments = [name.rpartition("=") for name in self.takes.split()]
        positional = [arrays[name] for keyword, _, name in arguments if not keyword]
        named = {keyword: arrays[name] for keyword, _, name in arguments if keyword}
        return self.function(*positional, **named, **self.keywords, **more)
