"""Models that are trained next to the policy: a critic, an implicit reward model.

Each begins as the policy or as a model of a directory, is trained whole or by an
adapter, and has an optimizer, a part of every checkpoint and a directory at the end.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from jaxrl_post import models, pretrained
from jaxrl_post.algorithms import Predictions
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.learner.adapters import lora_of, with_adapter
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.model import Model, check_beside
from jaxrl_post.learner.state import TrainState
from jaxrl_post.models.adapters.lora import merged
from jaxrl_post.models.matrix import is_matrix
from jaxrl_post.models.spec import copied, is_abstract
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.types import TokenBatch

__all__ = ["Companion", "CompanionName", "check_companion", "open_companion"]

# Names of the options' section, of the metrics, of the part of a checkpoint and of the
# directory.
CompanionName = Literal["critic", "prm"]


@dataclass
class Companion:
    """A model that is trained next to the policy, with its learner and its state."""

    name: CompanionName
    model: Model
    learner: Learner
    state: TrainState

    @property
    def trained(self) -> Model:
        """The model with its present parameters."""
        return dataclasses.replace(self.model, params=self.state.params)

    def predict(self, batch: TokenBatch) -> Predictions:
        """Returns NumPy predictions [rows, length] for a NumPy batch; no entropies."""
        whole = self.model.whole(self.state.params)
        return self.learner.scorer.predict(whole, batch)

    def update(self, batch: TokenBatch, *, where: str) -> dict[str, float]:
        """Takes an optimizer step; returns metrics, with its own name for train/.

        Args:
            batch: as for `Learner.update`.
            where: name of the update, for errors.

        Raises:
            DivergenceError: as `Learner.update`.
        """
        self.state, found = self.learner.update(
            self.state, batch, where=f"{where}, {self.name}"
        )
        return {
            name.replace("train/", f"{self.name}/"): value
            for name, value in found.items()
            # The entropy is its own, if it has one, and not the policy's.
            if not name.startswith("policy/")
        }


class _Kind(NamedTuple):
    """The properties that tell one companion from another.

    Attributes:
        name: of the options' section.
        noun: for messages.
        head: of its model.
        seed: added to the run's, so that no two adapters begin with equal values or
            drop the same entries; a head tells dropout apart too.
    """

    name: CompanionName
    noun: str
    head: Literal["value", "lm"]
    seed: int


def _kind(config: CriticConfig | PrmConfig) -> _Kind:
    if isinstance(config, CriticConfig):
        return _Kind("critic", "a critic of its own", "value", 0)
    return _Kind("prm", "an implicit reward model", "lm", 1)


def check_companion(
    config: CriticConfig | PrmConfig, policy: AdapterConfig, model: Model
) -> None:
    """Refuses options of a companion that contradict other options.

    Args:
        config: the companion's options.
        policy: the adapter of the policy.
        model: the policy, before any adapter.

    Raises:
        ConfigError: the adapter's options do not fit, the companion cannot start from
            the policy's weights, or the policy sees pictures.
        CheckpointError: the family has no checkpoint format for value models.
    """
    kind, own = _kind(config), config.lora
    if model.config.vision is not None:
        raise ConfigError(
            "--critic.backbone: must be shared with --vision, since no file format has "
            "a critic of its own that sees; give --critic.backbone shared"
            if kind.name == "critic"
            else "--vision: an implicit reward model reads text alone; drop the "
            "option, or use another --algorithm.name"
        )
    option = f"--{kind.name}.lora"
    if config.model is not None:
        if own.rank == 0:
            lora_of(own, model.config, option=option)
        return
    begun = _config_of(model, kind)
    if kind.head == "value":
        # Fail now, not at the final save, if the family cannot save value models.
        write_config(begun)
    lora_of(own, begun, option=option)
    if policy.quantize is not None and not own.rank:
        raise ConfigError(
            f"--lora.quantize: {kind.noun} begins as a copy of the model, in which "
            "quantised matrices could not learn; drop the option, or give "
            f"--{kind.name}.lora.rank or --{kind.name}.model"
        )
    if policy.rank and own.quantize not in (None, policy.quantize):
        raise ConfigError(
            f"{option}.quantize: its adapter shares the policy's frozen matrices, "
            f"which are {policy.quantize or 'not quantised'}; got {own.quantize}. Drop "
            f"the option, or give --{kind.name}.model"
        )
    if kind.head == "lm" and own.rank and policy.path is not None:
        raise ConfigError(
            f"{option}.rank: a new adapter begins as the base, and the reference as "
            f"the base with --lora.path {policy.path}, so that rewards would not begin "
            f"at 0; drop the option, or give --{kind.name}.model"
        )


def open_companion(
    config: CriticConfig | PrmConfig, model: Model, *, seed: int, longest: int
) -> Model:
    """Opens a separate model from the policy's weights or a directory.

    If it and the policy both train adapters, they share the arrays of the frozen base.
    Otherwise it gets its own arrays.

    Args:
        config: names the directory, if any, and the adapter.
        model: the policy; of an abstract one the companion is abstract too.
        seed: seed of the adapter's initial values.
        longest: tokens of the longest sequence that it reads.

    Raises:
        CheckpointError: the directory does not hold a readable model.
        ConfigError: the adapter's options do not fit, the context of the directory's
            model is shorter than `longest`, or it lacks the outputs that are needed.
    """
    kind = _kind(config)
    option = f"--{kind.name}.model"
    shared = config.model is None and config.lora.rank > 0
    shared = shared and model.adaptation is not None
    if config.model is None:
        opened = _beginning_as(model, kind, shared=shared)
    else:
        found, params = pretrained.load(
            config.model,
            mesh=model.mesh,
            rules=model.rules,
            dtype=model.dtype,
            head=None if kind.head == "lm" else kind.head,
            weights=not is_abstract(model.params),
        )
        if found.head != kind.head:
            raise ConfigError(
                f"{option}: {config.model} is a reward model with a head; it has no "
                "output for tokens. Give a language model"
            )
        check_beside(found, config.model, longest, option)
        found = found.within(longest)
        opened = dataclasses.replace(
            model,
            name=config.model,
            config=found,
            specs=models.param_specs(found),
            params=params,
            preset=False,
            adaptation=None,
            published=None,
        )
    lora = config.lora
    if any(map(is_matrix, jax.tree.leaves(opened.params, is_leaf=is_matrix))):
        lora = dataclasses.replace(lora, quantize=None)
    return with_adapter(
        lora,
        opened,
        seed=(seed + kind.seed) % 2**32,
        option=f"--{kind.name}.lora",
        donate=not shared,
    )


def _beginning_as(model: Model, kind: _Kind, *, shared: bool) -> Model:
    """Returns the policy, with a value head of zeros if it has one.

    Arrays are shared or copied.
    """
    config = _config_of(model, kind)
    params, adaptation = model.base, model.adaptation
    continued = adaptation is not None and adaptation.continued
    if adaptation is not None and continued and not (shared or is_abstract(params)):
        params = merged(params, model.params, model.config, adaptation.lora)
    specs = models.param_specs(config)
    if kind.head == "value":
        params = params.replace(unembedding=None)  # type: ignore[attr-defined]
    if not shared:
        # An optimizer step donates its arrays, so it must not donate shared ones.
        params = copied(params)
    if kind.head == "value":
        head, layout = (
            {"head": specs.value_head},
            (model.dtype, model.mesh, model.rules),
        )
        if is_abstract(params):
            fresh = models.abstract(head, *layout)
        else:
            fresh = models.initialize(jax.random.key(0), head, *layout)
        params = params.replace(value_head=fresh["head"])  # type: ignore[attr-defined]
    return dataclasses.replace(
        model, config=config, specs=specs, params=params, adaptation=None
    )


def _config_of(model: Model, kind: _Kind) -> models.ModelConfig:
    return dataclasses.replace(model.config, head=kind.head)
