"""Adapters in training: their configs, and the policy of adapter and frozen base."""

import dataclasses
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxrl_post.algorithms import Predictions
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.learner.model import Adaptation, Model
from jaxrl_post.learner.step import Policy, chunks_of, predict
from jaxrl_post.models import DecoderParams, Head, ModelConfig
from jaxrl_post.models.adapters.dropout import Dropout
from jaxrl_post.models.adapters.lora import (
    Adapter,
    LoRAConfig,
    adaptable,
    adapted,
    adapter_specs,
    check_adapter,
    initialize_adapter,
)
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.adapters.whole import copies, whole_specs
from jaxrl_post.models.params import text_specs
from jaxrl_post.models.spec import abstract, is_abstract
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.directory import read_config_file
from jaxrl_post.pretrained.families import read_config, right_label
from jaxrl_post.pretrained.peft.bases import bases, targets_of
from jaxrl_post.pretrained.peft.files import check_saves, load_adapter
from jaxrl_post.pretrained.peft.joined import parted
from jaxrl_post.sharding import DEFAULT_RULES, Rules
from jaxrl_post.types import Array, TokenBatch

__all__ = ["AdaptedPolicy", "continued", "lora_of", "with_adapter"]

# The fully trained parameters next to an adapter, by head. A language model lacks them,
# so they start at zero.
HEADS: dict[Head, tuple[str, ...]] = {
    "lm": (),
    "value": ("value_head",),
    "lm+value": ("value_head",),
    "process": ("process_head",),
}


class Draws(NamedTuple):
    """Arguments of a microbatch's random numbers.

    Attributes:
        seed: uint32, of the run.
        step: int32, optimizer steps taken before.
        row: int32, number of the microbatch's first row in its batch.
    """

    seed: Any
    step: Any
    row: Any


@struct.dataclass
class AdaptedPolicy:
    """The `Predictor` of a frozen base with an adapter.

    Attributes:
        base: the frozen parameters, a jit argument that is never donated.
        policy: the model's policy.
        lora: the adapter's config.
        seed: of dropout.
        draws: of a microbatch in training with dropout; else None, for no dropout.
    """

    base: DecoderParams[Array]
    policy: Policy = struct.field(pytree_node=False)
    lora: LoRAConfig = struct.field(pytree_node=False)
    seed: int = struct.field(pytree_node=False, default=0)
    draws: Draws | None = None

    def predict(self, params: Adapter[Array], batch: TokenBatch) -> Predictions:
        """Returns the predictions for a batch; differentiable in the adapter."""
        dropout = None if self.draws is None else self._dropout(self.draws, batch)
        whole = adapted(self.base, params, self.policy.config, self.lora, dropout)
        return predict(self.policy, whole, batch)

    def in_training(self, step: Array, row: int) -> "AdaptedPolicy":
        """Returns the predictor with dropout, if the adapter has it."""
        if not self.lora.dropout:
            return self
        draws = Draws(np.uint32(self.seed), step, np.int32(row))
        return self.replace(draws=draws)  # type: ignore[attr-defined]

    def _dropout(self, draws: Draws, batch: TokenBatch) -> Dropout:
        """Numbers the tokens of the whole batch, and puts them in the model's order."""
        # A critic has the run's seed too, and the same matrices.
        name = f"dropout of {self.policy.config.head}"
        key = jax.random.fold_in(jax.random.key(draws.seed), zlib.crc32(name.encode()))
        rows, length = batch.tokens.shape
        places = jnp.arange(rows * length, dtype=jnp.int32).reshape(rows, length)
        numbers = chunks_of(self.policy, batch).split(draws.row * length + places)
        return Dropout(
            jax.random.fold_in(key, draws.step), numbers.reshape(-1), self.lora.dropout
        )


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
    try:
        lora = LoRAConfig(
            rank=config.rank,
            alpha=config.alpha,
            targets=targets_of(model, config.targets),
            rank_stabilized=config.rank_stabilized,
            dora=config.dora,
            whole=HEADS[model.head],
            dropout=config.dropout,
        )
        check_saves(model, lora)
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"{option}.*: {error}") from error
    if config.quantize is not None:
        _check_quantizes(config.quantize, model, option)
    return lora


def _check_quantizes(kind: Literal["int8", "nf4"], model: ModelConfig, option: str):
    try:
        quantize(abstract(text_specs(model), jnp.float32), kind)
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


def continued(config: AdapterConfig, model: str) -> AdapterConfig:
    """Fills in the options of the adapter with whose values a run begins, if any.

    Args:
        config: the adapter's options, with a local `path`.
        model: directory of the model under it.

    Raises:
        ConfigError: an option contradicts the adapter, which is no adapter of this
            model, or trains parameters whole that are not trained here.
    """
    if config.path is None:
        return config
    try:
        architecture = read_config(read_config_file(Path(model)))
        lora, _ = _read(config.path, architecture)
        own = config.targets and targets_of(architecture, config.targets)
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"--lora.path: {error}") from error
    if more := set(lora.whole) - set(HEADS[architecture.head]):
        raise ConfigError(
            f"--lora.path: {config.path} has {', '.join(sorted(more))} of its own "
            "(modules_to_save), and here only a head is trained whole; give the "
            "adapter as --model, which merges it, and train a new one"
        )
    if own and set(own) != set(lora.targets):
        _contradicted("targets", own, lora.targets)
    default = AdapterConfig()
    for name in ("rank", "alpha", "rank_stabilized", "dora"):
        given, found = getattr(config, name), getattr(lora, name)
        if given not in (getattr(default, name), found):
            _contradicted(name, given, found)
    return dataclasses.replace(
        config,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        rank_stabilized=lora.rank_stabilized,
        dora=lora.dora,
    )


def _read(
    path: str,
    config: ModelConfig,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[LoRAConfig, Adapter[Array]]:
    """Loads an adapter of PEFT with the rank that it was trained with here."""
    lora, adapter = load_adapter(path, config, mesh=mesh, rules=rules)
    return parted(bases(config, adaptable(config)), adapter, lora)


def _contradicted(name: str, given: Any, found: Any) -> NoReturn:
    given, found = (
        " ".join(each) if isinstance(each, tuple) else each for each in (given, found)
    )
    raise ConfigError(
        f"--lora.{name.replace('_', '-')}: the adapter of --lora.path has {found}, and "
        f"a run that continues it cannot change that; got {given}. Drop the option"
    )


def _values(
    path: str, model: Model, base: DecoderParams[Any], lora: LoRAConfig
) -> Adapter[Array]:
    """The values of the adapter that a run continues, in the form of `lora`."""
    try:
        _, adapter = _read(path, model.config, model.mesh, model.rules)
        # A head that it lacks begins as the model's.
        whole = whole_specs(model.config, lora.whole)
        fresh = {name: spec for name, spec in whole.items() if name not in adapter}
        adapter = adapter | copies(fresh, base, model.mesh, model.rules)
        check_adapter(adapter, model.config, lora)
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"--lora.path: {error}") from error
    return adapter


def with_adapter(
    config: AdapterConfig,
    model: Model,
    *,
    seed: int,
    option: str = "--lora",
    donate: bool = False,
) -> Model:
    """Returns a model that trains an adapter over a frozen base.

    The adapter is new, or has the values of `AdapterConfig.path`.

    Args:
        config: the adapter's options; with rank 0 the model is returned unchanged.
        model: the model that becomes the frozen base; of an abstract one the adapter
            is abstract too.
        seed: seed of the adapter's initial values.
        option: as in `lora_of`.
        donate: whether to free the model's matrices once they are quantised; no other
            code may use them.

    Raises:
        ConfigError: as `lora_of`, or the adapter of the path does not fit.
    """
    lora, base = lora_of(config, model.config, option=option), model.base
    if lora is None:
        return model
    _check_labels(model, option)
    if config.quantize is not None:
        # Quantise first, because DoRA needs the norms of the quantised base.
        text = dataclasses.replace(base, vision=None)
        text = quantize(text, config.quantize, donate=donate)
        base = dataclasses.replace(text, vision=base.vision)
    specs = adapter_specs(model.config, lora)
    if is_abstract(base):
        adapter = abstract(specs, jnp.float32, model.mesh, model.rules)
    elif config.path is not None:
        adapter = _values(config.path, model, base, lora)
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
        tower=None,
        adaptation=Adaptation(base, lora, seed, continued=config.path is not None),
    )
