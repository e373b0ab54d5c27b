"""Fully trained modules that PEFT saves with an adapter: modules_to_save."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl_post.models.adapters.whole import whole_specs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import text_specs
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import family_of
from jaxrl_post.pretrained.name_map import Entry, entries_of, paths

__all__ = ["whole_entries", "whole_of_modules"]


def whole_of_modules(
    config: ModelConfig, modules: Sequence[str], config_file: Path
) -> tuple[str, ...]:
    """Converts PEFT's modules_to_save to parameter paths, as in `LoRAConfig.whole`.

    As in PEFT, the ends of names must match. Unknown modules are ignored, because PEFT
    lists modules for a classifier that the model may not have.

    Args:
        config: the model's config.
        modules: modules_to_save in adapter_config.json.
        config_file: path of adapter_config.json, for messages.

    Raises:
        CheckpointError: a module holds an adaptable matrix.

    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1,
    ...                      head="value")
    >>> whole_of_modules(config, ["classifier", "score"], Path("adapter_config.json"))
    ('value_head',)
    """
    if not modules:
        return ()

    def named(entry: Entry) -> bool:
        names = (entry.name, *entry.also)
        return any(name.rpartition(".")[0].endswith(tuple(modules)) for name in names)

    every = _every(config)
    found = {entry.path for entry in every if named(entry)}
    left = {entry.path for entry in every} - found
    whole = {}
    for path in paths(text_specs(config)):
        if path in found:
            group = path.rpartition(".")[0]
            torn = not group or any(other.startswith(f"{group}.") for other in left)
            whole[path if torn else group] = None
    try:
        whole_specs(config, tuple(whole))
    except ValueError as error:
        raise CheckpointError(
            f"{config_file}: modules_to_save={list(modules)} is not supported: {error}"
        ) from error
    return tuple(whole)


def whole_entries(config: ModelConfig, names: tuple[str, ...]) -> list[Entry]:
    """Returns the entries of fully trained parameters, without PEFT's prefix.

    Args:
        config: the model's config.
        names: as `LoRAConfig.whole`.

    Raises:
        CheckpointError: a parameter shares its tensor with others, is spread over
            several tensors, or is a tied embedding.
        ValueError: as `whole_specs`.
    """
    wanted, found = whole_specs(config, names), []
    if config.tie_embeddings and "embedding" in wanted:
        raise CheckpointError(
            f"adapter: the embedding of this {config.model_type} is its output too, "
            "and PEFT would train the one apart from the other; save the model that "
            "`merged` returns"
        )
    for entry in _every(config):
        if entry.path not in wanted:
            continue
        if entry.expert is not None or entry.shape != entry.layout.stored_shape:
            raise CheckpointError(
                f"adapter: {entry.path} is no tensor of its own in {config.model_type} "
                f"checkpoints, but shares {entry.name} or is spread over several; save "
                "the model that `merged` returns"
            )
        found.append(replace(entry, path=f"{entry.path}.weight"))
    return found


def _every(config: ModelConfig) -> list[Entry]:
    return entries_of(family_of(config.model_type).weights, text_specs(config))
