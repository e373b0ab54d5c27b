"""What tells one family of models from another, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.layout import Weight

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """What a family's checkpoints look like.

    Attributes:
        architecture: the class in transformers, before "ForCausalLM".
        weights: our path of a parameter, with `*` for the layer, to its place on disk.
        config_from_hf: a parsed config.json to our config.
        config_to_hf: our config to the contents of a config.json.
        classifier: the class before "ForSequenceClassification", as which a reward
            model is saved; "" for `architecture`, None where transformers has none.
        judges_tokens: whether transformers has a class "ForTokenClassification", as
            which a process reward model is saved.
        prefixes: what names on disk may begin with, and what stands for it in
            `weights`.
        vision: patterns of the tensors of a part that sees, around a text model of the
            family; they are left unread, and a warning says so.
        ignored: patterns of tensors that are left unread; `*` is any text and `+` the
            number of a layer beyond the model's.
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
