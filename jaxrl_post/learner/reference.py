"""Frozen policies next to the trained one: KL reference or teacher."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Divergence
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.examples.texts import tokenizer_of
from jaxrl_post.learner.learner import Learner, Scorer
from jaxrl_post.learner.model import (
    Model,
    check_beside,
    open_model,
    read_tokenizer,
)
from jaxrl_post.learner.step import Policy
from jaxrl_post.learner.teacher import Comparison
from jaxrl_post.models.spec import copied, is_abstract
from jaxrl_post.types import PyTree

__all__ = [
    "Reference",
    "beside_teacher",
    "open_reference",
    "require_directory",
    "require_same_ids",
]


@dataclass(frozen=True)
class Reference:
    """A frozen policy with the trained policy's tokenizer; its shape may differ."""

    scorer: Scorer
    params: PyTree


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
) -> Reference:
    """Opens the frozen policy of a run.

    Args:
        model: the model to train, at step 0; of an abstract one the reference is
            abstract too.
        learner: gives temperature, rematerialisation and the size of a microbatch.
        directory: a model directory; None for the model at step 0.
        option: name of the directory's option, for errors.
        longest: tokens of the longest sequence that the policy scores.

    Raises:
        ConfigError: the directory's tokenizer has other ids, or its model's context is
            shorter than `longest`.
    """
    if directory is None:
        # Nothing is compared with a reference's last bits.
        policy = replace(learner.policy, exact=False)
        scorer = replace(learner.scorer, policy=policy)
        if model.adaptation is not None:
            return Reference(scorer, model.base)
        # Copy the arrays, because the first update donates the originals.
        return Reference(scorer, copied(model.params))
    frozen = open_model(
        directory,
        mesh=model.mesh,
        dtype=model.dtype.name,
        seed=0,
        make_tokenizer=partial(tokenizer_of, list),
        rules=model.rules,
        option=option,
        weights=not is_abstract(model.params),
    )
    require_same_ids(directory, model, option)
    check_beside(frozen.config, directory, longest, option)
    policy = learner.policy
    scorer = Scorer(
        Policy(
            frozen.config,
            policy.temperature,
            policy.remat,
            frozen.rules,
            kernels=policy.kernels,
        ),
        learner.mesh,
        learner.microbatch_rows,
    )
    return Reference(scorer, frozen.params)


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
