"""Policies next to the trained one: KL reference or teacher."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Divergence, Predictions
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.examples.texts import tokenizer_of
from jaxrl_post.learner.learner import Learner, Scorer
from jaxrl_post.learner.model import (
    Model,
    check_beside,
    describe_model,
    read_tokenizer,
    with_weights,
)
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.step import Policy
from jaxrl_post.learner.teacher import Comparison
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.spec import copied, is_abstract
from jaxrl_post.sharding import placed
from jaxrl_post.types import Array, PyTree, TokenBatch

__all__ = [
    "NO_SYNC",
    "Following",
    "Reference",
    "Sync",
    "beside_teacher",
    "open_reference",
    "require_directory",
    "require_same_ids",
]


class Sync(NamedTuple):
    """Steps between two moves of a reference to the policy, and their size.

    Attributes:
        steps: steps of the run from one synchronisation to the next; 0 for none.
        mixup: share of the policy in the new reference, in (0, 1]; the rest is the old
            reference. 1 is a copy.

    References:
        Gorbatovski et al., Learn Your Reference Model, arXiv:2404.09656.
    """

    steps: int = 0
    mixup: float = 1.0


NO_SYNC = Sync()
# Fields of a model's config in which a reference that follows may differ.
WITHOUT_EFFECT = ("max_length", "initializer_range")


@dataclass(frozen=True)
class Following:
    """The parts with which a reference follows the trained policy.

    Attributes:
        steps: as `Sync.steps`, >= 1.
        mix: compiled function of (reference, policy), trees of equal shapes; returns
            the new reference, and donates the old one.
        layout: shardings of the reference.
    """

    steps: int
    mix: Callable[[PyTree, PyTree], PyTree]
    layout: PyTree


@dataclass
class Reference:
    """A policy with the trained policy's tokenizer; its shape may differ.

    Attributes:
        scorer: computes its predictions.
        params: its parameters, or its adapter alone.
        whole: returns the parameters for `forward`, given `params`.
        following: None if `params` stay as they are.
    """

    scorer: Scorer
    params: PyTree
    whole: Callable[[PyTree], PyTree] = lambda params: params
    following: Following | None = None
    # `_bits` of `params`; None before the first step.
    _total: int | None = field(default=None, init=False)

    def predict(self, batch: TokenBatch) -> Predictions:
        """Returns NumPy predictions [rows, length] for a NumPy batch; no entropies."""
        return self.scorer.predict(self.whole(self.params), batch)

    def follow(self, state: TrainState, number: int) -> dict[str, float]:
        """Moves to the policy if it is time, before step `number` reads the reference.

        The first step that reads a new reference is one more than a multiple of
        `Following.steps`. What is evaluated after a step has the step's own reference.

        Args:
            state: the policy's, before the step.
            number: of the step, from 1.

        Returns:
            Scalar metrics, among them whether the reference has changed by itself since
            the last call.
        """
        total = int(_bits(self.params))
        changed = self._total is not None and self._total != total
        self._total, metrics = total, {"reference/changed": float(changed)}
        if self.following is None:
            return metrics
        last = (number - 1) // self.following.steps * self.following.steps
        if last and last == number - 1:
            policy = state.params if state.master is None else state.master
            self.params = self.following.mix(self.params, policy)
            self._total = int(_bits(self.params))
        return metrics | {"reference/last_sync": float(last)}

    @property
    def saved(self) -> PyTree | None:
        """Its part of a checkpoint: `params`, or None if they never change."""
        return None if self.following is None else self.params

    @property
    def layout(self) -> PyTree | None:
        """Shardings of `saved`."""
        return None if self.following is None else self.following.layout

    def restore(self, saved: PyTree | None) -> None:
        """Restores a value of `saved`."""
        if self.following is not None:
            self.params = saved
            self._total = None


@jax.jit
def _bits(params: PyTree) -> Array:
    """uint32: the sum of all bits' numbers, which any change of a parameter changes.

    Sums of integers have one result in any order, on any mesh.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize])
        total += jnp.sum(bits, dtype=jnp.uint32)
    return total


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def require_directory(path: str | None, option: str) -> None:
    """Refuses a missing model directory before a run starts.

    Args:
        path: the directory, None if the option was not given.
        option: name of the option, for the error.

    Raises:
        ConfigError: the directory does not exist.
    """
    if path is not None and not Path(path).is_dir():
        raise ConfigError(
            f"{option}: no such directory: {path}; give a model's directory, or "
            "ORG/NAME of one on the hub"
        )


def require_same_ids(directory: str | None, model: Model, option: str) -> None:
    """Refuses a model whose token ids differ from the trained one's.

    Args:
        directory: of the model, None if the option was not given.
        model: the model to train.
        option: name of the option, for the error.

    Raises:
        ConfigError: the tokenizers differ, or one is missing.
    """
    if directory is None:
        return
    if not read_tokenizer(directory, option).same_ids(model.tokenizer):
        raise ConfigError(
            f"{option}: the tokenizer of {directory} has other ids than "
            f"{model.name}'s; token by token they cannot be compared. Use a model of "
            "the same family"
        )


def open_reference(
    model: Model,
    learner: Learner,
    directory: str | None,
    option: str,
    *,
    longest: int,
    sync: Sync = NO_SYNC,
) -> Reference:
    """Opens the reference of a run, or its teacher.

    Args:
        model: the model to train, at step 0; of an abstract one the reference is
            abstract too.
        learner: gives temperature, rematerialisation, the size of a microbatch, and
            the layout of the parameters.
        directory: a model directory; None for the model at step 0.
        option: name of the directory's option, for errors.
        longest: tokens of the longest sequence that the policy scores.
        sync: how it follows the trained policy; with an adapter only as a copy.

    Raises:
        ConfigError: the directory's tokenizer has other ids, its model's context is
            shorter than `longest`, or it should follow a policy of another kind.
    """
    reference = _opened(
        model, learner, directory, option, longest, follows=bool(sync.steps)
    )
    if not sync.steps:
        return reference
    layout = learner.layout.params
    if sync.mixup < 1 and model.dtype != jnp.float32:
        # In bfloat16 a small share of a small change would be rounded away.
        widen, params = _cast(jnp.dtype(jnp.float32), layout), reference.params
        if is_abstract(params):
            reference.params = placed(jax.eval_shape(widen, params), layout)
        else:
            reference.params = widen(params)
        reference.whole = _cast(model.dtype, layout)
    mix = jax.jit(partial(_mixed, sync.mixup), out_shardings=layout, donate_argnums=0)
    reference.following = Following(sync.steps, mix, layout)
    return reference


def _cast(dtype: jnp.dtype, layout: PyTree) -> Callable[[PyTree], PyTree]:
    """A compiled function that returns parameters in another dtype."""
    cast = lambda leaf: leaf.astype(dtype)  # noqa: E731
    return jax.jit(partial(jax.tree.map, cast), out_shardings=layout)


def _mixed(share: float, reference: PyTree, policy: PyTree) -> PyTree:
    """Returns share * policy + (1 - share) * reference, in the reference's dtype."""

    def mix(old: Array, new: Array) -> Array:
        old32, new32 = old.astype(jnp.float32), new.astype(jnp.float32)
        return (share * new32 + (1 - share) * old32).astype(old.dtype)

    return jax.tree.map(mix, reference, policy)


def _opened(
    model: Model,
    learner: Learner,
    directory: str | None,
    option: str,
    longest: int,
    *,
    follows: bool,
) -> Reference:
    """The reference as it begins; see `open_reference`."""
    if directory is None:
        # Nothing is compared with a reference's last bits.
        policy = replace(learner.policy, exact=0)
        scorer = replace(learner.scorer, policy=policy)
        adaptation = model.adaptation
        if adaptation is not None and not (follows or adaptation.continued):
            return Reference(scorer, model.base)
        # Copy the arrays, because the first update donates the originals.
        return Reference(scorer, copied(model.params), model.whole)
    frozen = describe_model(
        directory,
        mesh=model.mesh,
        dtype=model.dtype.name,
        make_tokenizer=partial(tokenizer_of, list),
        # Next to a critic on the policy's backbone it has the policy's tree.
        head=model.config.head if follows else "lm",
        rules=model.rules,
        option=option,
        vision="off" if model.config.vision is None else "trained",
    )
    if not is_abstract(model.params):
        frozen = with_weights(frozen, seed=0, option=option)
    require_same_ids(directory, model, option)
    check_beside(frozen.config, directory, longest, option)
    frozen = frozen.within(longest)
    if follows:
        _check_same_kind(frozen.config, model.config, directory, option)
    policy = learner.policy
    scorer = Scorer(
        Policy(
            frozen.config,
            policy.temperature,
            policy.remat,
            frozen.rules,
            kernels=policy.kernels,
            float8=policy.float8,
        ),
        learner.mesh,
        learner.microbatch_rows,
    )
    return Reference(scorer, frozen.params)


def _check_same_kind(
    found: ModelConfig, trained: ModelConfig, directory: str, option: str
) -> None:
    """Refuses a model that computes something else with the trained parameters."""
    names = [each.name for each in fields(found) if each.name not in WITHOUT_EFFECT]
    for name in names:
        has, wanted = getattr(found, name), getattr(trained, name)
        if has != wanted:
            raise ConfigError(
                f"{option}-sync-steps: {directory} cannot follow the policy, which is "
                f"another model: its {name} is {has}, the policy's {wanted}. Drop the "
                f"option, or drop {option} to begin with the policy itself"
            )


def beside_teacher(
    learner: Learner, teacher: Reference, divergence: Divergence, *, temperature: float
) -> Learner:
    """Returns a learner whose objective receives the divergence from a teacher.

    Args:
        learner: the student's learner.
        teacher: a policy with the student's tokenizer.
        divergence: as `Algorithm.divergence`.
        temperature: > 0; divides the logits of both.

    Raises:
        ConfigError: the vocabularies differ in size, or the student has an adapter.
        ValueError: the divergence needs more tokens than the vocabulary has.
    """
    sizes = [
        policy.config.vocab_size for policy in (teacher.scorer.policy, learner.policy)
    ]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"--algorithm.reference: the teacher's vocabulary has {sizes[0]} tokens, "
            f"the student's {sizes[1]}; whole distributions cannot be compared. Use "
            "--distill.divergence sampled, or a teacher of the same size"
        )
    logits = jax.ShapeDtypeStruct((1, sizes[0]), jnp.float32)
    mask = jax.ShapeDtypeStruct((1,), jnp.bool_)
    jax.eval_shape(lambda *inputs: divergence(*inputs), logits, logits, mask)
    if learner.policy.config.vision is not None:
        raise ConfigError(
            "--vision: whole distributions are compared for rows of text; take off, or "
            "use --distill.divergence sampled"
        )
    if learner.predictor is not None:
        raise ConfigError(
            "--lora.rank: whole distributions are compared for a student without an "
            "adapter; drop the option, or use --distill.divergence sampled"
        )
    comparison = Comparison(
        student=replace(learner.policy, temperature=temperature),
        teacher=teacher.scorer.policy,
        divergence=divergence,
        params=teacher.params,
    )
    return replace(learner, predictor=comparison)
