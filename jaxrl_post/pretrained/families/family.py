"""The description of a family of models: config, names and layouts of weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.layout import Weight

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """The format of a family's checkpoints.

    Attributes:
        architecture: the class in transformers, without the suffix "ForCausalLM".
        weights: name and layout on disk of every parameter by our path, with `*` for
            the layer's number.
        config_from_hf: converts a parsed config.json to our config.
        config_to_hf: converts our config to the contents of a config.json.
        classifier: the class of a saved reward model without the suffix
            "ForSequenceClassification"; "" for `architecture`, None for no such class.
        judges_tokens: whether transformers has a class "ForTokenClassification" of the
            family, with which a process reward model is saved.
        prefixes: pairs of a prefix in a checkpoint and its replacement in `weights`.
        vision: patterns of vision tensors in a checkpoint that includes a text model
            of the family; they are left unread with a warning.
        ignored: patterns of tensors that are left unread; `*` matches any text and `+`
            the number of a layer after the model's own layers.
    """

    architecture: str
    weights: Mapping[str, Weight]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    classifier: str | None = ""
    judges_tokens: bool = True
    prefixes: tuple[tuple[str, str], ...] = ()
    vision: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
