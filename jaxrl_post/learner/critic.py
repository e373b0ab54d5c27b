"""A separate critic: its initial weights and its trained parameters."""

import dataclasses

import jax

from jaxrl_post import models, pretrained
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.learner.adapters import lora_of, with_adapter
from jaxrl_post.learner.model import Model, check_beside
from jaxrl_post.models.adapters.lora import merged
from jaxrl_post.models.matrix import is_matrix
from jaxrl_post.models.spec import copied, is_abstract
from jaxrl_post.pretrained.families import write_config

__all__ = ["check_critic", "open_critic"]

OPTION = "--critic.lora"


def check_critic(config: RLConfig, model: Model) -> None:
    """Refuses options of a separate critic that contradict other options.

    Args:
        config: the run's config.
        model: the policy, before any adapter.

    Raises:
        ConfigError: the adapter's options do not fit, the critic cannot start from the
            policy's weights, or the policy sees pictures.
        CheckpointError: the family has no checkpoint format for value models.
    """
    critic, policy = config.critic, config.lora
    if model.config.vision is not None:
        raise ConfigError(
            "--critic.backbone: must be shared with --vision, since no file format has "
            "a critic of its own that sees; give --critic.backbone shared"
        )
    if critic.model is None:
        # Fail now, not at the final save, if the family cannot save value models.
        write_config(_value_config(model))
    if critic.model is not None:
        if critic.lora.rank == 0:
            lora_of(critic.lora, model.config, option=OPTION)
        return
    lora_of(critic.lora, _value_config(model), option=OPTION)
    if policy.quantize is not None and not critic.lora.rank:
        raise ConfigError(
            "--lora.quantize: a critic of its own begins as a copy of the model, in "
            "which quantised matrices could not learn; drop the option, or give "
            "--critic.lora.rank or --critic.model"
        )
    if policy.rank and critic.lora.quantize not in (None, policy.quantize):
        raise ConfigError(
            f"{OPTION}.quantize: the critic's adapter shares the policy's frozen "
            f"matrices, which are {policy.quantize or 'not quantised'}; got "
            f"{critic.lora.quantize}. Drop the option, or give --critic.model"
        )


def open_critic(
    config: CriticConfig, model: Model, *, seed: int, longest: int
) -> Model:
    """Opens a separate value model from the policy's weights or a directory.

    If policy and critic both train adapters, they share the arrays of the frozen base.
    Otherwise the critic gets its own arrays.

    Args:
        config: names the directory, if any, and the adapter.
        model: the policy; of an abstract one the critic is abstract too.
        seed: seed of the adapter's initial values.
        longest: tokens of the longest sequence that the critic reads.

    Raises:
        CheckpointError: the directory does not hold a readable model.
        ConfigError: the adapter's options do not fit the critic, or the context of the
            directory's model is shorter than `longest`.
    """
    shared = config.model is None and config.lora.rank > 0
    shared = shared and model.adaptation is not None
    if config.model is None:
        critic = _beginning_as(model, shared=shared)
    else:
        value_config, params = pretrained.load(
            config.model,
            mesh=model.mesh,
            rules=model.rules,
            dtype=model.dtype,
            head="value",
            weights=not is_abstract(model.params),
        )
        check_beside(value_config, config.model, longest, "--critic.model")
        value_config = value_config.within(longest)
        critic = dataclasses.replace(
            model,
            name=config.model,
            config=value_config,
            specs=models.param_specs(value_config),
            params=params,
            preset=False,
            adaptation=None,
            published=None,
        )
    lora = config.lora
    if any(map(is_matrix, jax.tree.leaves(critic.params, is_leaf=is_matrix))):
        lora = dataclasses.replace(lora, quantize=None)
    return with_adapter(lora, critic, seed=seed, option=OPTION, donate=not shared)


def _beginning_as(model: Model, *, shared: bool) -> Model:
    """Returns the policy with a value head of zeros; arrays are shared or copied."""
    config = _value_config(model)
    params, adaptation = model.base, model.adaptation
    continued = adaptation is not None and adaptation.continued
    if adaptation is not None and continued and not (shared or is_abstract(params)):
        params = merged(params, model.params, model.config, adaptation.lora)
    params = params.replace(unembedding=None)  # type: ignore[attr-defined]
    if not shared:
        # An optimizer step donates its arrays, so it must not donate shared ones.
        params = copied(params)
    specs = models.param_specs(config)
    head, layout = {"head": specs.value_head}, (model.dtype, model.mesh, model.rules)
    if is_abstract(params):
        fresh = models.abstract(head, *layout)
    else:
        fresh = models.initialize(jax.random.key(0), head, *layout)
    return dataclasses.replace(
        model,
        config=config,
        specs=specs,
        params=params.replace(value_head=fresh["head"]),
        adaptation=None,
    )


def _value_config(model: Model) -> models.ModelConfig:
    return dataclasses.replace(model.config, head="value")
