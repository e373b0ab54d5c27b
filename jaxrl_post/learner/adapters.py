"""Adapters in training: their configs, and the policy of adapter and frozen base."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.algorithms import Predictions
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.learner.model import Adaptation, Model
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.models import DecoderParams, Head, ModelConfig
from jaxrl_post.models.adapters.lora import (
    Adapter,
    LoRAConfig,
    adaptable,
    adapted,
    adapter_specs,
    initialize_adapter,
)
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.matrix import EXPERTS
from jaxrl_post.models.params import param_specs
from jaxrl_post.models.spec import abstract, is_abstract
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.directory import read_config_file
from jaxrl_post.pretrained.families import read_config, right_label
from jaxrl_post.pretrained.peft.files import check_saves
from jaxrl_post.types import Array, TokenBatch

__all__ = ["AdaptedPolicy", "lora_of", "with_adapter"]

# The fully trained parameters next to an adapter, by head. A language model lacks them,
# so they start at zero.
HEADS: dict[Head, tuple[str, ...]] = {
    "lm": (),
    "value": ("value_head",),
    "lm+value": ("value_head",),
    "process": ("process_head",),
}


@struct.dataclass
class AdaptedPolicy:
    """The `Predictor` of a frozen base with an adapter.

    Attributes:
        base: the frozen parameters, a jit argument that is never donated.
        policy: the model's policy.
        lora: the adapter's config.
    """

    base: DecoderParams[Array]
    policy: Policy = struct.field(pytree_node=False)
    lora: LoRAConfig = struct.field(pytree_node=False)

    def predict(self, params: Adapter[Array], batch: TokenBatch) -> Predictions:
        """Returns the predictions for a batch; differentiable in the adapter."""
        whole = adapted(self.base, params, self.policy.config, self.lora)
        return predict(self.policy, whole, batch)


def lora_of(
    config: AdapterConfig, model: ModelConfig, *, option: str = "--lora"
) -> LoRAConfig | None:
    """Returns the adapter's config for a model; None for a rank of 0.

    A value or process head is fully trained next to the adapter.

    Args:
        config: the adapter's options.
        model: config of the model to adapt.
        option: the command line's name of `config`, for errors.

    Raises:
        ConfigError: options are set without a rank, or do not fit this model.
    """
    if not config.rank:
        if config != AdapterConfig():
            raise ConfigError(
                f"{option}.*: has no effect with a rank of 0; give {option}.rank"
            )
        return None
    default = [name for name in adaptable(model) if name not in EXPERTS]
    try:
        lora = LoRAConfig(
            rank=config.rank,
            alpha=config.alpha,
            targets=config.targets or tuple(default),
            rank_stabilized=config.rank_stabilized,
            dora=config.dora,
            whole=HEADS[model.head],
        )
        check_saves(model, lora)
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"{option}.*: {error}") from error
    if config.quantize is not None:
        _check_quantizes(config.quantize, model, option)
    return lora


def _check_quantizes(kind: Literal["int8", "nf4"], model: ModelConfig, option: str):
    try:
        quantize(abstract(param_specs(model), jnp.float32), kind)
    except ValueError as error:
        raise ConfigError(
            f"{option}.quantize: {kind} does not fit this model: {error}; use int8"
        ) from error


def _check_labels(model: Model, option: str) -> None:
    """Refuses a process reward model on which PEFT would swap the adapter's labels."""
    if model.config.head != "process" or model.source is None:
        return
    raw = read_config_file(model.source)
    if read_config(raw).head == "process" and right_label(raw) == 0:
        raise ConfigError(
            f"{option}.rank: label 0 of {model.source} means right, and an adapter is "
            "written for label 1; write the model with our labels first: python -m "
            "launch.convert"
        )


def with_adapter(
    config: AdapterConfig,
    model: Model,
    *,
    seed: int,
    option: str = "--lora",
    donate: bool = False,
) -> Model:
    """Returns a model that trains a new adapter over a frozen base.

    Args:
        config: the adapter's options; with rank 0 the model is returned unchanged.
        model: the model that becomes the frozen base; of an abstract one the adapter
            is abstract too.
        seed: seed of the adapter's initial values.
        option: as in `lora_of`.
        donate: whether to free the model's matrices once they are quantised; no other
            code may use them.

    Raises:
        ConfigError: as `lora_of`.
    """
    lora, base = lora_of(config, model.config, option=option), model.params
    if lora is None:
        return model
    _check_labels(model, option)
    if config.quantize is not None:
        # Quantise first, because DoRA needs the norms of the quantised base.
        base = quantize(base, config.quantize, donate=donate)
    specs = adapter_specs(model.config, lora)
    if is_abstract(base):
        adapter = abstract(specs, jnp.float32, model.mesh, model.rules)
    else:
        adapter = initialize_adapter(
            jax.random.key(seed),
            base,
            model.config,
            lora,
            dtype=jnp.float32,
            mesh=model.mesh,
            rules=model.rules,
        )
    return dataclasses.replace(
        model,
        specs=specs,
        params=adapter,
        adaptation=Adaptation(base, lora),
    )
