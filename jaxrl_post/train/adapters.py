"""Runs that train an adapter: the frozen base, and the policy over both."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.algorithms import Predictions
from jaxrl_post.models import DecoderParams, Head, ModelConfig
from jaxrl_post.models.lora import (
    Adapter,
    LoRAConfig,
    adaptable,
    adapted,
    adapter_specs,
    initialize_adapter,
)
from jaxrl_post.models.quantized import quantize
from jaxrl_post.train.config import ConfigError
from jaxrl_post.train.lora_config import AdapterConfig
from jaxrl_post.train.session import Adaptation, Model
from jaxrl_post.train.step import Policy, predict
from jaxrl_post.types import Array, TokenBatch

__all__ = ["AdaptedPolicy", "lora_of", "with_adapter"]

# What of a model is trained whole beside an adapter, by its head: what a language model
# lacks, and begins with zeros.
HEADS: dict[Head, tuple[str, ...]] = {
    "lm": (),
    "value": ("value_head",),
    "lm+value": ("value_head",),
    "process": ("process_head",),
}


@struct.dataclass
class AdaptedPolicy:
    """Predictions of a frozen base under an adapter: a `Predictor`.

    Attributes:
        base: an argument of the programs, never donated.
        policy: of the model.
        lora: of the adapter.
    """

    base: DecoderParams[Array]
    policy: Policy = struct.field(pytree_node=False)
    lora: LoRAConfig = struct.field(pytree_node=False)

    def predict(self, params: Adapter[Array], batch: TokenBatch) -> Predictions:
        """What the policy says about a batch; differentiable in the adapter."""
        whole = adapted(self.base, params, self.policy.config, self.lora)
        return predict(self.policy, whole, batch)


def lora_of(
    config: AdapterConfig, model: ModelConfig, *, option: str = "--lora"
) -> LoRAConfig | None:
    """The adapter that a configuration asks for; None for a rank of 0.

    A head that is not the vocabulary's is trained whole with it.

    Args:
        config: of the adapter.
        model: to adapt.
        option: the command line's name of `config`, for errors.

    Raises:
        ConfigError: options without a rank, or that make no sense for this model.
    """
    if not config.rank:
        if config != AdapterConfig():
            raise ConfigError(
                f"{option}.*: has no effect with a rank of 0; give {option}.rank"
            )
        return None
    default = [name for name in LoRAConfig().targets if name in adaptable(model)]
    try:
        lora = LoRAConfig(
            rank=config.rank,
            alpha=config.alpha,
            targets=tuple(config.targets) or tuple(default),
            rank_stabilized=config.rank_stabilized,
            dora=config.dora,
            whole=HEADS[model.head],
        )
        adapter_specs(model, lora)
    except ValueError as error:
        raise ConfigError(f"{option}.*: {error}") from error
    return lora


def with_adapter(
    config: AdapterConfig,
    model: Model,
    *,
    seed: int,
    option: str = "--lora",
    donate: bool = False,
) -> Model:
    """A model whose trained parameters are an adapter that changes nothing yet.

    Args:
        config: of the adapter; rank 0 leaves the model as it is.
        model: becomes the frozen base.
        seed: of what is drawn.
        option: as in `lora_of`.
        donate: frees the model's matrices where they are quantised; nothing else may
            have them.

    Raises:
        ConfigError: as `lora_of`.
    """
    lora, base = lora_of(config, model.config, option=option), model.params
    if lora is None:
        return model
    adapter = initialize_adapter(
        jax.random.key(seed),
        base,
        model.config,
        lora,
        dtype=jnp.float32,
        mesh=model.mesh,
        rules=model.rules,
    )
    if config.quantize is not None:
        base = quantize(base, config.quantize, donate=donate)
    return dataclasses.replace(
        model,
        specs=adapter_specs(model.config, lora),
        params=adapter,
        adaptation=Adaptation(base, lora),
    )
