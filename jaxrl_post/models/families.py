"""Which checkpoints can be read: Hugging Face's model_type to its family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_post.models import llama, qwen
from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.layout import Weight

__all__ = ["FAMILIES", "Family", "family_of", "read_config", "write_config"]


@dataclass(frozen=True)
class Family:
    """What a family's checkpoints look like.

    Attributes:
        architecture: the class in transformers, before "ForCausalLM".
        weights: our path of a parameter, with `*` for the layer, to its place on disk.
        config_from_hf: a parsed config.json to our config.
        config_to_hf: our config to the contents of a config.json.
    """

    architecture: str
    weights: Mapping[str, Weight]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", llama.WEIGHTS, llama.config_from_hf, llama.config_to_hf),
    "qwen2": Family("Qwen2", qwen.WEIGHTS, qwen.qwen2_from_hf, qwen.qwen2_to_hf),
    "qwen3": Family("Qwen3", qwen.WEIGHTS, qwen.qwen3_from_hf, qwen.qwen3_to_hf),
}


def family_of(model_type: Any) -> Family:
    """Returns the family of a model_type.

    Raises:
        CheckpointError: it is not supported.
    """
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"unknown model_type {model_type!r}; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turns a parsed config.json into our config.

    Raises:
        CheckpointError: an unknown family, or a config that the decoder cannot follow.

    >>> qwen = {"model_type": "qwen2", "vocab_size": 256, "hidden_size": 64,
    ...         "intermediate_size": 128, "num_hidden_layers": 2,
    ...         "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> read_config(qwen).qkv_bias
    True
    """
    config = family_of(raw.get("model_type")).config_from_hf(raw)
    return replace(config, head=_head(raw))


# With one label, a sequence classifier of transformers is a value head without bias.
LM, VALUE = "ForCausalLM", "ForSequenceClassification"
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _head(raw: Mapping[str, Any]) -> Head:
    names = raw.get("architectures") or [LM]
    if not any(str(name).endswith(VALUE) for name in names):
        return "lm"
    # transformers leaves the labels out where there are two.
    labels = len(raw.get("id2label", "ab"))
    if labels != 1:
        raise CheckpointError(
            f"architectures: {names[0]} must have one label to be a reward model; got "
            f"{labels} in id2label"
        )
    return "value"


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Turns our config into the contents of a config.json.

    Raises:
        CheckpointError: the family in transformers has no such model. What was written
            is read back and compared, so nothing is lost in silence.
    """
    family = family_of(config.model_type)
    if config.head == "lm+value":
        raise CheckpointError(
            'transformers has no model with head="lm+value"; save the policy without '
            "its value head"
        )
    value = config.head == "value"
    raw = {
        "architectures": [family.architecture + (VALUE if value else LM)],
        **family.config_to_hf(config),
        **(ONE_LABEL if value else {}),
    }
    expected, found = _comparable(config), _comparable(read_config(raw))
    if found != expected:
        name = next(n for n, v in vars(expected).items() if getattr(found, n) != v)
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express {name}="
            f"{getattr(expected, name)!r} with the rest of the config; "
            f"it would be read back as {getattr(found, name)!r}"
        )
    return raw


def _comparable(config: ModelConfig) -> ModelConfig:
    """Removes differences that mean nothing.

    Full attention has two spellings, and `rope_scaling` has fields that its kind does
    not use; the families write a scaling exactly or raise.
    """
    windows = tuple(config.window(layer) for layer in range(config.num_layers))
    return replace(config, windows=windows, rope_scaling=None)
