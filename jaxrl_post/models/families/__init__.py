"""Which checkpoints can be read: Hugging Face's model_type to its family."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_moe,
    seed_oss,
    smollm,
)
from jaxrl_post.models.families.family import Family

__all__ = ["FAMILIES", "Family", "family_of", "read_config", "write_config"]

GEMMA3 = Family(
    "Gemma3",
    gemma.GEMMA2_WEIGHTS,
    gemma.gemma3_from_hf,
    gemma.gemma3_to_hf,
    classifier="Gemma3Text",
    prefixes=gemma.GEMMA3_PREFIXES,
    ignored=gemma.GEMMA3_IGNORED,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", llama.WEIGHTS, llama.config_from_hf, llama.config_to_hf),
    "mistral": Family(
        "Mistral", llama.WEIGHTS, mistral.mistral_from_hf, mistral.mistral_to_hf
    ),
    "mixtral": Family(
        "Mixtral",
        mistral.MIXTRAL_WEIGHTS,
        mistral.mixtral_from_hf,
        mistral.mixtral_to_hf,
    ),
    "qwen2": Family("Qwen2", qwen.WEIGHTS, qwen.qwen2_from_hf, qwen.qwen2_to_hf),
    "qwen2_moe": Family(
        "Qwen2Moe",
        qwen_moe.WEIGHTS,
        qwen_moe.qwen2_moe_from_hf,
        qwen_moe.qwen2_moe_to_hf,
    ),
    "qwen3": Family("Qwen3", qwen.WEIGHTS, qwen.qwen3_from_hf, qwen.qwen3_to_hf),
    "qwen3_moe": Family(
        "Qwen3Moe",
        qwen_moe.WEIGHTS,
        qwen_moe.qwen3_moe_from_hf,
        qwen_moe.qwen3_moe_to_hf,
    ),
    "gemma": Family("Gemma", llama.WEIGHTS, gemma.gemma_from_hf, gemma.gemma_to_hf),
    "gemma2": Family(
        "Gemma2", gemma.GEMMA2_WEIGHTS, gemma.gemma2_from_hf, gemma.gemma2_to_hf
    ),
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "phi3": Family("Phi3", phi.WEIGHTS, phi.config_from_hf, phi.config_to_hf),
    "olmo2": Family("Olmo2", olmo.WEIGHTS, olmo.olmo2_from_hf, olmo.olmo2_to_hf),
    "olmo3": Family("Olmo3", olmo.WEIGHTS, olmo.olmo3_from_hf, olmo.olmo3_to_hf),
    "olmoe": Family(
        "Olmoe",
        olmo.OLMOE_WEIGHTS,
        olmo.olmoe_from_hf,
        olmo.olmoe_to_hf,
        classifier=None,
    ),
    "granite": Family(
        "Granite",
        llama.WEIGHTS,
        granite.config_from_hf,
        granite.config_to_hf,
        classifier=None,
    ),
    "smollm3": Family(
        "SmolLM3", llama.WEIGHTS, smollm.config_from_hf, smollm.config_to_hf
    ),
    "seed_oss": Family(
        "SeedOss", llama.WEIGHTS, seed_oss.config_from_hf, seed_oss.config_to_hf
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        glm.WEIGHTS,
        glm.config_from_hf,
        glm.config_to_hf,
        classifier=None,
        ignored=glm.NEXT_TOKEN_LAYERS,
    ),
    "deepseek_v2": Family(
        "DeepseekV2", deepseek.WEIGHTS, deepseek.v2_from_hf, deepseek.v2_to_hf
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        deepseek.WEIGHTS,
        deepseek.v3_from_hf,
        deepseek.v3_to_hf,
        ignored=glm.NEXT_TOKEN_LAYERS,
    ),
    "gpt_oss": Family(
        "GptOss", gpt_oss.WEIGHTS, gpt_oss.config_from_hf, gpt_oss.config_to_hf
    ),
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
    if value and family.classifier is None:
        raise CheckpointError(
            f"transformers has no sequence classifier of {config.model_type}, as which "
            "a reward model is saved; use another family"
        )
    name = family.architecture
    name = (family.classifier or name) + VALUE if value else name + LM
    raw = {
        "architectures": [name],
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

    What is None because it follows from the rest is spelled out, full attention has two
    spellings, and `rope_scaling` has fields that its kind does not use; the families
    write a scaling exactly or raise.
    """
    return replace(
        config,
        windows=tuple(config.window(layer) for layer in range(config.num_layers)),
        rope_scaling=None,
        rotary_dim=config.rotated_dims,
        attention_scale=config.score_scale,
    )
