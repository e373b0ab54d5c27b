"""Checks an algorithm from outside the package, before a run trusts it.

A wrong mask, a NaN or a loss that no gradient reaches shows late in a run, or never.
Here the algorithm's functions are called under `jax.jit` on a small batch: two prompts
with two samples, one of them invalid, then two sequences with prompts and padding.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.algorithms.objective import Algorithm, Objective, Predictions
from jaxrl_post.algorithms.pairs import PreferenceAlgorithm
from jaxrl_post.metrics import Metric
from jaxrl_post.specs import check_takes, fits, raised
from jaxrl_post.types import TokenBatch

__all__ = ["broken", "broken_preference"]

REWARDS = np.array([[1.0, 0.0], [0.5, np.nan]], np.float32)
VALID = np.array([[True, True], [True, False]])
MASK = np.array([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], np.bool_)
ENDS = np.array([[5, 5, 5, 5, 5, 0], [6, 6, 6, 6, 6, 6]], np.int32)


def broken(algorithm: Any) -> str | None:
    """Returns how an algorithm breaks the contract of `Algorithm`, or None.

    - `advantages` returns float32 [groups, samples], finite, and 0 for invalid samples.
    - `credit`, if any, returns the batch with finite advantages [rows, length].
    - `objective`, `value_objective` and `prm_objective` return an `Objective` of scalar
      metrics. What stands where the mask is False, even NaN, changes neither the loss
      nor the gradient; a gradient reaches the predictions where the mask is True.

    Args:
        algorithm: what is said to be an algorithm.

    Raises:
        Exception: the algorithm's own, at inputs that a run gives it.

    >>> from jaxrl_post.algorithms import grpo
    >>> broken(grpo())
    >>> broken(grpo()._replace(advantages=lambda rewards, valid: rewards))
    'advantages must be finite, and 0 for invalid samples; got [[1.0, 0.0], [0.5, nan]]'
    """
    if not isinstance(algorithm, Algorithm):
        return (
            "must return an Algorithm, such as jaxrl_post.algorithms.compose makes; "
            f"got {type(algorithm).__name__}"
        )
    for name, wanted in get_type_hints(Algorithm).items():
        value = getattr(algorithm, name)
        if not fits(value, wanted):
            kind = inspect.formatannotation(wanted)
            if not fits(object(), wanted):  # what is no function
                kind = "a function or None" if fits(None, wanted) else "a function"
            return f"{name} must be {kind}; got {value!r:.80}"
    return _of_advantages(algorithm) or _of_objectives(algorithm)


def broken_preference(algorithm: Any) -> str | None:
    """Returns how a loss breaks the contract of `PreferenceAlgorithm`, or None.

    As `broken` checks an objective, on a pair of two answers.

    Args:
        algorithm: what is said to be a preference loss.

    Raises:
        Exception: the loss's own, at inputs that a run gives it.

    >>> from jaxrl_post.algorithms.preference import dpo
    >>> broken_preference(dpo())
    >>> broken_preference(dpo()._replace(needs_reference=False))
    'reads batch.reference_logprobs, which a run computes only where needs_reference is
    True; set it'
    """
    if not isinstance(algorithm, PreferenceAlgorithm):
        return (
            "must return a PreferenceAlgorithm, such as "
            "jaxrl_post.algorithms.pairs.compose_pairs makes; got "
            f"{type(algorithm).__name__}"
        )
    given = functools.partial(_pair, unpaired=algorithm.mismatched is not None)
    return _of_objective(
        algorithm.objective, "objective", "logprobs", given, algorithm.needs_reference
    )


def _pair(
    uncounted: float, reference: bool, *, unpaired: bool
) -> tuple[Predictions, TokenBatch]:
    """Two answers to a question, the chosen one first, and padding."""
    mask = np.array([[0, 0, 1, 1, 0, 0, 1, 0]], np.bool_)
    zeros = jnp.zeros(mask.shape, jnp.float32)
    tokens = functools.partial(_tokens, uncounted=uncounted, mask=mask)
    batch = TokenBatch(
        tokens=jnp.ones(mask.shape, jnp.int32),
        positions=jnp.array([[0, 1, 2, 3, 0, 1, 2, 0]], jnp.int32),
        ends=jnp.array([[4, 4, 4, 4, 7, 7, 7, 0]], jnp.int32),
        loss_mask=jnp.asarray(mask),
        advantages=zeros,
        behavior_logprobs=zeros,
        versions=jnp.full(mask.shape, -1, jnp.int32),
        reference_logprobs=tokens(1) if reference else None,
        reference_point=zeros if unpaired else None,
        labels=jnp.array([[1, 1, 1, 1, -1, -1, -1, 0]], jnp.float32),
    )
    return Predictions(tokens(0)), batch


def _of_advantages(algorithm: Algorithm) -> str | None:
    read = {"rewards": REWARDS, "valid": VALID}
    if algorithm.reads == "components":
        read["rewards"] = REWARDS[..., None]
    if algorithm.reads == "lengths":
        read["lengths"] = np.array([[3, 5], [4, 1]], np.int32)
    if algorithm.reads == "greedy":
        read["greedy_rewards"] = np.array([0.5, 0.0], np.float32)
    try:
        check_takes(algorithm.advantages, tuple(read), "advantages")
    except ValueError as error:
        return str(error)
    values = jax.jit(algorithm.advantages)(*map(jnp.asarray, read.values()))
    if problem := _shaped(values, (2, 2), "advantages", "groups, samples"):
        return problem
    found = np.asarray(values)
    if not np.isfinite(found).all() or found[1, 1] != 0:
        return (
            "advantages must be finite, and 0 for invalid samples; got "
            f"{found.tolist()}"
        )
    return None


def _of_objectives(algorithm: Algorithm) -> str | None:
    functions = {
        "objective": algorithm.objective,
        "value_objective": algorithm.value_objective,
        "prm_objective": algorithm.prm_objective,
    }
    for name, function in functions.items():
        if function is None:
            continue
        field = "values_after" if name == "value_objective" else "logprobs"
        if algorithm.divergence is not None and name == "objective":
            field = "divergence"
        for one_update in (False, True):
            given = functools.partial(_given, algorithm, one_update=one_update)
            try:
                problem = _of_objective(
                    function, name, field, given, algorithm.needs_reference
                )
            except Exception as error:
                if not one_update:
                    raise
                return (
                    f"{name} reads batch.proximal_logprobs, which are None where a "
                    "batch serves one update; take jax.lax.stop_gradient("
                    f"predictions.logprobs) there. It raises {raised(error)}"
                )
            if problem is not None:
                return problem
    return None


# Inputs of an objective, with a number at the tokens that the mask leaves out, and
# with the reference's log-probs or without.
type _Given = Callable[[float, bool], tuple[Predictions, TokenBatch]]


def _given(
    algorithm: Algorithm, uncounted: float, reference: bool, *, one_update: bool
) -> tuple[Predictions, TokenBatch]:
    batch = _batch(algorithm, uncounted, reference, one_update)
    if algorithm.credit is not None:
        batch = jax.jit(algorithm.credit)(batch)
        if not isinstance(batch, TokenBatch):
            raise _BrokenError(
                f"credit must return a TokenBatch, got {type(batch).__name__}"
            )
        if problem := _shaped(batch.advantages, (2, 6), "credit's advantages"):
            raise _BrokenError(problem)
        if not np.isfinite(np.asarray(batch.advantages)[MASK]).all():
            raise _BrokenError(
                "credit's advantages must be finite where the mask is True"
            )
    return _predictions(algorithm, uncounted), batch


def _of_objective(
    function: Callable[[Predictions, TokenBatch], Objective],
    name: str,
    field: str,
    given: _Given,
    needs_reference: bool,
) -> str | None:
    try:
        results = _results(function, name, field, given, needs_reference)
    except _BrokenError as error:
        return str(error)
    except Exception:
        if needs_reference:
            raise
        try:
            _results(function, name, field, given, True)
        except Exception:
            reads = False
        else:
            reads = True
        if not reads:
            raise
        return (
            "reads batch.reference_logprobs, which a run computes only where "
            "needs_reference is True; set it"
        )
    return _compared(results, name, field)


def _results(
    function: Callable[[Predictions, TokenBatch], Objective],
    name: str,
    field: str,
    given: _Given,
    reference: bool,
) -> list[Any]:
    """Losses, objectives and gradients, with zeros and with NaN at other tokens."""
    found = []
    for uncounted in (0.0, np.nan):
        predictions, batch = given(uncounted, reference)

        def loss(values, predictions=predictions, batch=batch):
            made = function(predictions._replace(**{field: values}), batch)
            _require(made, name)
            return made.loss.sum, (made, batch.loss_mask)

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        found.append(run(getattr(predictions, field)))
    return found


class _BrokenError(Exception):
    """An objective breaks the contract while it is traced."""


def _require(found: Any, name: str) -> None:
    if not isinstance(found, Objective) or not isinstance(found.loss, Metric):
        raise _BrokenError(
            f"{name} must return an Objective whose loss is a Metric, got "
            f"{type(getattr(found, 'loss', found)).__name__}"
        )
    if not isinstance(found.metrics, dict) or not all(
        isinstance(key, str) for key in found.metrics
    ):
        raise _BrokenError(
            f"{name}: metrics must be a dict of Metrics by name, got "
            f"{found.metrics!r:.80}"
        )
    for key, metric in {"loss": found.loss, **found.metrics}.items():
        shapes = [jnp.shape(part) for part in jax.tree.leaves(metric)]
        if not isinstance(metric, Metric) or any(shapes):
            raise _BrokenError(
                f"{name}: {key} must be a Metric of two scalars, got "
                f"{type(metric).__name__} of shapes {shapes}"
            )


def _compared(results: list[Any], name: str, field: str) -> str | None:
    """Compares the results for zeros and for NaN where the mask is False."""
    (clean, gradient), (other, gradient_of_nan) = results
    (value, (found, mask)), (value_of_nan, _) = clean, other
    count = float(found.loss.count)
    if not np.isfinite(float(value)) or not 0 < count < np.inf:
        return (
            f"{name}: loss must have a finite sum and a count above 0; got "
            f"{float(value)} and {count}"
        )
    for key, metric in found.metrics.items():
        if not np.isfinite(float(metric.mean())):
            return f"{name}: the metric {key} is {float(metric.mean())}"
    gradient, gradient_of_nan = np.asarray(gradient), np.asarray(gradient_of_nan)
    if not np.isfinite(gradient).all():
        return (
            f"{name}: the gradient of the loss is not finite, got {gradient.tolist()}; "
            "jnp.where passes on the NaN of the side that it does not take, so make "
            "its arguments finite first"
        )
    same = np.array_equal(gradient, gradient_of_nan)
    reached = field != "values_after" and gradient[~np.asarray(mask)].any()
    if float(value) != float(value_of_nan) or not same or reached:
        told = "a gradient reaches them"
        if float(value) != float(value_of_nan):
            told = f"NaN there changes the loss from {value} to {value_of_nan}"
        elif not same:
            told = "NaN there changes the gradient of the loss"
        return (
            f"{name} must not look at tokens where the loss mask is False: {told}; put "
            "values through jnp.where(mask, values, 0) before they are computed with "
            "(jaxrl_post.losses does)"
        )
    if not gradient.any():
        return (
            f"{name}: no gradient reaches predictions.{field}, so nothing would be "
            "learned; is there a stop_gradient too many?"
        )
    return None


def _shaped(
    values: Any, shape: tuple[int, ...], name: str, axes: str = "rows, length"
) -> str | None:
    found = type(values).__name__
    if isinstance(values, jax.Array):
        if (values.shape, values.dtype) == (shape, jnp.float32):
            return None
        found = f"{values.dtype} {list(values.shape)}"
    return f"{name} must be float32 [{axes}], here {list(shape)}; got {found}"


def _predictions(algorithm: Algorithm, uncounted: float) -> Predictions:
    values = _tokens(4, uncounted)
    if algorithm.divergence is not None:
        spread = jnp.abs(values)
        return Predictions(entropy=spread, divergence=spread, teacher_entropy=spread)
    critic = algorithm.value_objective is not None
    return Predictions(
        logprobs=values,
        entropy=jnp.abs(_tokens(5, uncounted)),
        # The value before an answer is the value after its prompt.
        values_after=_tokens(6, -1.0) if critic else None,
    )


def _batch(
    algorithm: Algorithm, uncounted: float, reference: bool, one_update: bool
) -> TokenBatch:
    tokens = functools.partial(_tokens, uncounted=uncounted)
    # The two samples of a prompt: one was better than the other.
    better = jnp.where(jnp.arange(2)[:, None] == 0, 1.0, -0.5)
    critic = algorithm.value_objective is not None
    answers = jnp.broadcast_to(jnp.array([[1], [2]], jnp.int32), MASK.shape)
    graded: dict[str, jax.Array] = {}
    if algorithm.prm_objective is not None:
        graded["prm_logprobs"] = tokens(7)
        graded["labels"] = (answers == 1).astype(jnp.float32)
        graded |= {"answers": answers, "groups": jnp.ones_like(answers)}
    return TokenBatch(
        tokens=jnp.ones(MASK.shape, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), MASK.shape),
        ends=jnp.asarray(ENDS),
        loss_mask=jnp.asarray(MASK),
        advantages=jnp.where(MASK, better, uncounted).astype(jnp.float32),
        behavior_logprobs=tokens(0),
        versions=jnp.where(MASK, 0, -1).astype(jnp.int32),
        proximal_logprobs=None if one_update else tokens(1),
        reference_logprobs=tokens(2) if reference else None,
        values_before=tokens(3) if critic else None,
        truncated=jnp.zeros(MASK.shape, jnp.bool_) if critic else None,
        bootstrap=jnp.zeros(MASK.shape, jnp.float32) if critic else None,
        **graded,
    )


def _tokens(seed: int, uncounted: float, mask: np.ndarray = MASK) -> jax.Array:
    """Log-probs where the mask is True, so near to another seed's that none clips."""
    near = -1.0 + 1e-5 * np.random.default_rng(seed).normal(size=mask.shape)
    return jnp.asarray(np.where(mask, near, uncounted), jnp.float32)
