"""Keys of config.json that some families have, each read and written by one value."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families.layers import (
    kinds_of_layers,
    layer_types,
    windows_of,
    with_experts,
    with_windows,
)
from jaxrl_post.pretrained.hf_rope import FULL, SLIDING
from jaxrl_post.pretrained.hf_values import Json, flag, integer, optional_integer

__all__ = [
    "ATTENTION_BIAS",
    "MLP_BIAS",
    "ONE_WINDOW",
    "Key",
    "all_layers",
    "count_of_experts",
    "fixed",
    "layers_from",
    "option",
    "required_experts",
    "single_window",
    "uniform_window",
    "wide_experts",
    "windows",
    "written",
]


class Key(NamedTuple):
    """One or several keys of config.json, and the options of our config that they set.

    Attributes:
        read: (parsed config.json, config) to the config with these options.
        write: config to these keys.
    """

    read: Callable[[Json, ModelConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


def option(
    name: str,
    reader: Callable[[Json, str, Any], Any],
    default: Any,
    *fields: str,
    written: str = "",
) -> Key:
    """A key whose value is the value of one or several options.

    Args:
        name: the key.
        reader: a function of `hf_values`.
        default: the value of transformers if the key is absent.
        *fields: the options of `ModelConfig` that get the value.
        written: the attribute that is written; the first field by default.

    >>> cap = option("cap", integer, 4, "logit_softcap")
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> cap.write(cap.read({"cap": 30}, config))
    {'cap': 30}
    """

    def read(raw: Json, config: ModelConfig) -> ModelConfig:
        return replace(config, **dict.fromkeys(fields, reader(raw, name, default)))

    def write(config: ModelConfig) -> dict[str, Any]:
        return {name: getattr(config, written or fields[0])}

    return Key(read, write)


def fixed(**values: Any) -> Key:
    """Keys of released files with the only values that the family has.

    The key raises a CheckpointError when it reads another value.
    """

    def read(raw: Json, config: ModelConfig) -> ModelConfig:
        for key, value in values.items():
            if raw.get(key, value) != value:
                raise CheckpointError(
                    f"{key} must be {value!r} for {config.model_type}; got {raw[key]!r}"
                )
        return config

    return Key(read, lambda _: dict(values))


def written(write: Callable[[ModelConfig], dict[str, Any]]) -> Key:
    """Keys that are written, and not read."""
    return Key(lambda _, config: config, write)


# Llama's keys: `attention_bias` is for all four projections.
ATTENTION_BIAS = option("attention_bias", flag, False, "qkv_bias", "output_bias")
MLP_BIAS = option("mlp_bias", flag, False, "mlp_bias")


type Layers = Callable[[Json], Callable[[int], bool]]


def all_layers(raw: Json) -> Callable[[int], bool]:
    """Every layer has a window."""
    return lambda _: True


def layers_from(default: int) -> Layers:
    """The layers from `max_window_layers` on have a window."""

    def sliding(raw: Json) -> Callable[[int], bool]:
        first = integer(raw, "max_window_layers", default)
        return lambda layer: layer >= first

    return sliding


def windows(
    sliding: Layers,
    width: int | None = None,
    *,
    nullable: bool = True,
    switched: bool = False,
    write: Callable[[ModelConfig], dict[str, Any]] | None = None,
) -> Key:
    """Sliding windows in the layers that `layer_types` names.

    Args:
        sliding: which layers have a window if `layer_types` is absent.
        width: the width of the windows, in tokens, if `sliding_window` is absent.
        nullable: whether a null `sliding_window` means that no layer has a window.
        switched: whether windows require a true `use_sliding_window`.
        write: writes the keys; by default `sliding_window` and `layer_types`.

    The key raises a CheckpointError for an unknown kind of layer, a wrong number of
    layers, no width, and, when it writes, for windows of several widths.
    """

    def read(raw: Json, config: ModelConfig) -> ModelConfig:
        used = not switched or flag(raw, "use_sliding_window", False)
        found = optional_integer(raw, "sliding_window", width) if used else None
        slides, none = sliding(raw), nullable and found is None
        default = [
            SLIDING if slides(layer) and not none else FULL
            for layer in range(config.num_layers)
        ]
        return with_windows(config, _windows(raw, default, found))

    def write_both(config: ModelConfig) -> dict[str, Any]:
        found = single_window(config)
        if found is None and not nullable:
            found = width
        return {"sliding_window": found, **layer_types(config)}

    return Key(read, write or write_both)


def _windows(
    raw: Json, default: Sequence[str], width: int | None
) -> tuple[int | None, ...]:
    """Reads the window of every layer."""
    kinds = kinds_of_layers(raw, default, SLIDING)
    if width is None and SLIDING in kinds:
        raise CheckpointError(
            f"layer_types names {SLIDING}, but use_sliding_window is not true or "
            f"sliding_window is null; set both or make every layer {FULL}"
        )
    return tuple(width if kind == SLIDING else None for kind in kinds)


def single_window(config: ModelConfig) -> int | None:
    """Returns the width of the sliding windows, None if all attention is full.

    Raises:
        CheckpointError: the windows have several widths.
    """
    widths = sorted({width for width in windows_of(config) if width})
    if len(widths) > 1:
        raise CheckpointError(
            f"windows must all have one width to be written; got {widths}"
        )
    return widths[0] if widths else None


def uniform_window(config: ModelConfig) -> int | None:
    """Returns the window of all layers, None if no layer has a window.

    Raises:
        CheckpointError: the layers' windows differ.
    """
    width = single_window(config)
    if width is not None and None in windows_of(config):
        raise CheckpointError(
            f"{config.model_type} checkpoints have one window for all layers; got "
            f"windows of {windows_of(config)}"
        )
    return width


def _read_one_window(raw: Json, config: ModelConfig) -> ModelConfig:
    width = optional_integer(raw, "sliding_window")
    return with_windows(config, (width,) * config.num_layers)


# All layers have the window `sliding_window`; null means no window.
ONE_WINDOW = Key(
    _read_one_window, lambda config: {"sliding_window": uniform_window(config)}
)


def required_experts(config: ModelConfig) -> MixtureOfExperts:
    """Returns the config's experts.

    Raises:
        CheckpointError: the config has none, which the family cannot express.
    """
    if config.experts is None:
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express experts=None"
        )
    return config.experts


def count_of_experts(raw: Json, default: int) -> int:
    """Reads the number of experts in the spelling of transformers 5 or 4."""
    return integer(raw, "num_local_experts", integer(raw, "num_experts", default))


def wide_experts(
    read: Callable[[Json], MixtureOfExperts],
    write: Callable[[MixtureOfExperts], dict[str, Any]],
) -> Key:
    """Experts in every layer, of the width `intermediate_size`.

    Args:
        read: reads the experts, whose `expert_size` is replaced.
        write: writes their keys but the width.
    """

    def read_all(raw: Json, config: ModelConfig) -> ModelConfig:
        found = replace(read(raw), expert_size=config.intermediate_size)
        return with_experts(config, found, ())

    def write_all(config: ModelConfig) -> dict[str, Any]:
        experts = required_experts(config)
        return {"intermediate_size": experts.expert_size, **write(experts)}

    return Key(read_all, write_all)
