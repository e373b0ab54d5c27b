"""Counts the layers and experts of a checkpoint from its tensors' names.

These counts are compared with config.json before any structure of that size is built:
a count that is wrong by orders of magnitude would cost minutes and all memory.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Weight
from jaxrl_post.pretrained.name_map import some

__all__ = ["check_counts", "next_token_layers"]

LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")


def check_counts(
    names: Collection[str],
    config: ModelConfig,
    weights: Mapping[str, Weight],
    config_file: Path,
) -> None:
    """Refuses a config with more layers or experts than the tensors have.

    Args:
        names: names of the tensors.
        config: the model's config.
        weights: the family's weights; they show if every expert has its own tensor.
        config_file: path of config.json, for messages.

    Raises:
        CheckpointError: the tensors have fewer layers or experts.
    """
    layers = _count(LAYER, names)
    if config.num_layers > layers:
        raise CheckpointError(
            f"{config_file}: num_hidden_layers is {config.num_layers}, but the weights "
            f"have {layers} layers; tensors: {some(names)}"
        )
    numbered = any("%" in weight.name for weight in weights.values())
    if not numbered or config.experts is None:
        return
    experts, wanted = _count(EXPERT, names), config.experts.num_experts
    if wanted > experts:
        raise CheckpointError(
            f"{config_file}: asks for {wanted} experts a layer, but the weights have "
            f"{experts} experts"
        )


def next_token_layers(names: Collection[str], num_layers: int, most: int) -> int:
    """Counts the layers for multi-token prediction after the model's own layers.

    Each of them has a projection `eh_proj` of embeddings and hidden states. A layer
    without `eh_proj` belongs to the model itself and must not be dropped.

    Args:
        names: names of the tensors.
        num_layers: number of the model's own layers.
        most: number of such layers that config.json declares.

    References:
        DeepSeek-V3, arXiv:2412.19437, 2.2.

    >>> next_token_layers(["model.layers.2.eh_proj.weight"], 2, most=1)
    1
    """
    number = 0
    while number < most and any(
        f"layers.{num_layers + number}.eh_proj" in name for name in names
    ):
        number += 1
    return number


def _count(pattern: re.Pattern[str], names: Collection[str]) -> int:
    found = (int(number) for name in names for number in pattern.findall(name))
    return max(found, default=-1) + 1
