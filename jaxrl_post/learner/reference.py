"""The frozen policy beside the one that trains: KL reference, or teacher."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Divergence
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.learner.learner import Learner, Scorer
from jaxrl_post.learner.model import Model, open_model
from jaxrl_post.learner.step import Policy
from jaxrl_post.learner.teacher import Comparison
from jaxrl_post.types import PyTree

__all__ = ["Reference", "beside_teacher", "open_reference", "require_directory"]


@dataclass(frozen=True)
class Reference:
    """A frozen policy, of the trained one's tokenizer, perhaps of another shape."""

    scorer: Scorer
    params: PyTree


def require_directory(path: str | None, option: str) -> None:
    """Refuses a model directory that is not there, before anything else is done.

    Args:
        path: None for an option that was not given.
        option: its name.

    Raises:
        ConfigError: there is no such directory.
    """
    if path is not None and not Path(path).is_dir():
        raise ConfigError(
            f"{option}: no such directory: {path}; give that of a model, or ORG/NAME "
            "of one on the hub"
        )


def open_reference(
    model: Model, learner: Learner, directory: str | None, option: str
) -> Reference:
    """Opens the frozen policy that a run looks at.

    Args:
        model: that begins to train.
        learner: gives temperature, rematerialisation and the size of a microbatch.
        directory: Hugging Face's; None for the model as it begins.
        option: that names the directory, for errors.

    Raises:
        ConfigError: the directory's tokenizer is another.
    """
    if directory is None:
        if model.adaptation is not None:
            return Reference(learner.scorer, model.base)
        # Arrays of its own: the first update takes the originals.
        return Reference(learner.scorer, jax.tree.map(jnp.copy, model.params))
    frozen = open_model(
        directory,
        mesh=",".join(f"{name}{size}" for name, size in model.mesh.shape.items()),
        dtype=model.dtype.name,
        seed=0,
        texts=list,
        rules=model.rules,
    )
    if not frozen.tokenizer.same_ids(model.tokenizer):
        raise ConfigError(
            f"{option}: the tokenizer of {directory} has other ids than "
            f"that of {model.name}; token by token they cannot be compared"
        )
    policy = learner.policy
    scorer = Scorer(
        Policy(frozen.config, policy.temperature, policy.remat, frozen.rules),
        learner.mesh,
        learner.microbatch_rows,
    )
    return Reference(scorer, frozen.params)


def beside_teacher(
    learner: Learner, teacher: Reference, divergence: Divergence, *, temperature: float
) -> Learner:
    """A learner whose objective sees the divergence from a teacher.

    Args:
        learner: of the student.
        teacher: of the student's tokenizer.
        divergence: as `Algorithm.divergence`.
        temperature: > 0; divides the logits of both.

    Raises:
        ConfigError: the teacher's vocabulary has another size, or an adapter trains.
        ValueError: the divergence needs more tokens than there are.
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
