"""The parts of layers, as config.json names them and as a config has them."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.models.recurrences import Recurrence
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.hf_rope import FULL, SLIDING
from jaxrl_post.pretrained.hf_values import Json

__all__ = [
    "dense_layers",
    "kinds_of_layers",
    "layer_types",
    "recurrent_types",
    "windows_of",
    "with_experts",
    "with_recurrence",
    "with_windows",
]


def kinds_of_layers(raw: Json, default: Sequence[str], other: str) -> Sequence[str]:
    """Reads `layer_types`: full attention or another kind for each layer.

    Args:
        raw: the parsed config.json.
        default: the kinds if the key is absent.
        other: the name of the other kind.

    Raises:
        CheckpointError: a kind is unknown, or the number of layers is wrong.
    """
    kinds = default if raw.get("layer_types") is None else raw["layer_types"]
    known = isinstance(kinds, list) and all(kind in (FULL, other) for kind in kinds)
    if not known or len(kinds) != len(default):
        raise CheckpointError(
            f"layer_types must name {FULL} or {other} for each of {len(default)} "
            f"layers; got {kinds}"
        )
    return kinds


def with_windows(config: ModelConfig, widths: Sequence[int | None]) -> ModelConfig:
    """Gives every layer its window."""
    return replace(
        config,
        layers=config.changed_layers(lambda i, spec: replace(spec, window=widths[i])),
    )


def windows_of(config: ModelConfig) -> list[int | None]:
    """The window of every layer."""
    return [config.window(layer) for layer in range(config.num_layers)]


def with_recurrence(
    config: ModelConfig, recurrence: Recurrence, kinds: Sequence[str]
) -> ModelConfig:
    """Gives layers of all kinds but full attention a recurrence."""
    used = {kind for kind in kinds if kind != FULL}
    mixers: tuple[Literal["attention", "recurrence"], ...] = tuple(
        "attention" if kind == FULL else "recurrence" for kind in kinds
    )
    return replace(
        config,
        recurrence=recurrence if used else None,
        layers=config.changed_layers(lambda i, spec: replace(spec, mixer=mixers[i])),
    )


def recurrent_types(config: ModelConfig, other: str) -> list[str]:
    """Kinds of layers for config.json: full attention, or `other`."""
    layers = range(config.num_layers)
    return [FULL if config.recurrent(i) is None else other for i in layers]


def with_experts(
    config: ModelConfig, experts: MixtureOfExperts, dense: Collection[int]
) -> ModelConfig:
    """Gives all layers the experts but those with a dense MLP."""
    layers = config.changed_layers(
        lambda i, spec: replace(spec, mlp="dense" if i in dense else "experts")
    )
    used = any(layer.mlp == "experts" for layer in layers)
    return replace(config, experts=experts if used else None, layers=layers)


def dense_layers(config: ModelConfig) -> list[int]:
    """The layers with a dense MLP."""
    return [i for i in range(config.num_layers) if config.layer(i).mlp == "dense"]


def layer_types(config: ModelConfig) -> dict[str, Any]:
    """Writes `layer_types`."""
    found = windows_of(config)
    return {"layer_types": [FULL if width is None else SLIDING for width in found]}
