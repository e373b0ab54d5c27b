"""All supported families of models, by Hugging Face's model_type."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import (
    deepseek,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    lfm2,
    llama,
    minimax,
    mistral,
    nemotron,
    olmo,
    phi,
    qwen,
    qwen_delta,
    vision,
)
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.names import nearest_first
from jaxrl_post.pretrained.vision.towers import TOWERS
from jaxrl_post.pretrained.vision.whole import read_vision, write_whole

__all__ = [
    "FAMILIES",
    "Family",
    "family_of",
    "read_config",
    "right_label",
    "write_config",
]

MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3 = map(
    vision.seeing,
    (mistral.MISTRAL, qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE, deepseek.DEEPSEEK_V3),
)
QWEN3_5, QWEN3_5_MOE = map(vision.seeing, (qwen_delta.QWEN3_5, qwen_delta.QWEN3_5_MOE))
KIMI = replace(DEEPSEEK_V3, text_model=vision.kimi_text)

FAMILIES: Mapping[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": MISTRAL,
    "mistral3": replace(MISTRAL, text_model=vision.mistral3_text),
    "mixtral": mistral.MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_5_vl": replace(QWEN2, text_model=vision.qwen2_5_text),
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_vl": replace(QWEN3, text_model=vision.qwen3_text),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe": replace(QWEN3_MOE, text_model=vision.qwen3_moe_text),
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma3_text": gemma.GEMMA3,
    "gemma4": replace(gemma4.GEMMA4, text_model=vision.gemma4_text),
    "gemma4_text": gemma4.GEMMA4,
    "gemma4_unified": replace(gemma4.GEMMA4, text_model=vision.gemma4_unified_text),
    "gemma4_unified_text": replace(gemma4.GEMMA4, text_model=gemma4.unified_text),
    "phi3": phi.PHI3,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "olmoe": olmo.OLMOE,
    "granite": llama.GRANITE,
    "smollm3": llama.SMOLLM3,
    "seed_oss": llama.SEED_OSS,
    "glm4_moe": glm.GLM4_MOE,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI,
    "kimi_k25": KIMI,
    "gpt_oss": gpt_oss.GPT_OSS,
    "ministral": vision.seeing(mistral.MINISTRAL),
    "ministral3": vision.seeing(mistral.MINISTRAL3),
    "internlm3": llama.INTERNLM3,
    "iquestcoder": llama.IQUEST_CODER,
    "cwm": llama.CWM,
    "dots1": glm.DOTS1,
    "solar_open": glm.SOLAR_OPEN,
    "glm4_moe_lite": deepseek.GLM4_MOE_LITE,
    "youtu": deepseek.YOUTU,
    "lfm2": lfm2.LFM2,
    "lfm2_moe": lfm2.LFM2_MOE,
    "deepseek_v32": deepseek.DEEPSEEK_V32,
    "glm_moe_dsa": deepseek.GLM_MOE_DSA,
    "minimax_m2": minimax.MINIMAX_M2,
    "nemotron_h": nemotron.NEMOTRON_H,
    "qwen3_next": qwen_delta.QWEN3_NEXT,
    "qwen3_5": replace(QWEN3_5, text_model=vision.qwen3_5_text),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": replace(QWEN3_5_MOE, text_model=vision.qwen3_5_text),
    "qwen3_5_moe_text": QWEN3_5_MOE,
}


def family_of(model_type: Any) -> Family:
    """Returns the family of a model_type.

    Raises:
        CheckpointError: the model_type is not supported.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"unknown model_type {model_type!r}; supported: "
            f"{nearest_first(str(model_type), FAMILIES)}"
        )
    return FAMILIES[model_type]


def read_config(raw: Mapping[str, Any], *, vision: bool = False) -> ModelConfig:
    """Turns a parsed config.json into our config.

    Args:
        raw: the parsed config.json.
        vision: whether to read the vision tower of a model that also sees, if it is
            supported; otherwise its text model alone is read.

    Raises:
        CheckpointError: unknown family, or a config that the decoder does not support.

    >>> qwen = {"model_type": "qwen2", "vocab_size": 256, "hidden_size": 64,
    ...         "intermediate_size": 128, "num_hidden_layers": 2,
    ...         "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> read_config(qwen).qkv_bias
    True
    """
    family, text = family_of(raw.get("model_type")), raw
    if family.text_model is not None:
        text = family.text_model(raw)
        family = family_of(text["model_type"])
    config = replace(family.config_from_hf(text), head=_head(raw))
    if vision and raw["model_type"] in TOWERS:
        return replace(config, vision=read_vision(raw, config))
    return config


# A sequence classifier in transformers with one label is a value head without bias. A
# token classifier with two labels is a process reward model, by TRL's convention.
LM, VALUE, PROCESS = (
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
)
LABELS = {"value": ("LABEL_0",), "process": ("wrong", "right")}
# Names of the two labels of a step in id2label.
WRONG = (
    "wrong", "incorrect", "bad", "negative", "false", "invalid", "error", "no", "-",
    "label_wrong", "label_incorrect", "label_negative",
)  # fmt: skip
RIGHT = (
    "right", "correct", "good", "positive", "true", "valid", "yes", "+",
    "label_right", "label_correct", "label_positive",
)  # fmt: skip


def _head(raw: Mapping[str, Any]) -> Head:
    names = raw.get("architectures")
    names = [LM] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"architectures must be a list of names of classes; got {names!r:.80}"
        )
    if not any(name.endswith((VALUE, PROCESS)) for name in names):
        return "lm"
    labels = len(_names_of_labels(raw))
    if any(name.endswith(VALUE) for name in names):
        if labels != 1:
            raise CheckpointError(
                f"architectures: {names[0]} must have one label to be a reward model; "
                f"got {labels} in id2label"
            )
        return "value"
    if labels != 2:
        raise CheckpointError(
            f"architectures: {names[0]} must have two labels, wrong and right, to be a "
            f"process reward model; got {labels} in id2label"
        )
    return "process"


def right_label(raw: Mapping[str, Any]) -> int:
    """Returns the label of a process reward model that means "right".

    The names in id2label decide; label 1 if neither name is known.

    Args:
        raw: the parsed config.json.

    Raises:
        CheckpointError: both names mean right, or both mean wrong.

    >>> right_label({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}})
    1
    >>> right_label({"id2label": {"0": "Correct", "1": "Incorrect"}})
    0
    """
    first, second = (
        (name in RIGHT) - (name in WRONG)
        for name in map(str.lower, _names_of_labels(raw))
    )
    if first and first == second:
        raise CheckpointError(
            "id2label: one of the labels of a process reward model must be called "
            f"right, the other wrong; got {raw['id2label']}"
        )
    return 0 if first > second else 1


def _names_of_labels(raw: Mapping[str, Any]) -> list[str]:
    """Returns the labels' names by number; transformers omits them for two labels."""
    names = raw.get("id2label")
    if names is None:
        return ["LABEL_0", "LABEL_1"]
    if not isinstance(names, Mapping):
        raise CheckpointError(
            f"id2label: must map numbers of labels to their names; got {names!r}"
        )
    return [str(names.get(str(number), "")) for number in range(len(names))]


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Turns our config into the contents of a config.json.

    Raises:
        CheckpointError: the family in transformers cannot express the config. The
            result is read back and compared, so that no option is lost silently.
    """
    family = family_of(config.model_type)
    if config.head == "lm+value":
        raise CheckpointError(
            'transformers has no model with head="lm+value"; save the policy without '
            "its value head"
        )
    raw = {
        "architectures": [_architecture(config, family)],
        **family.config_to_hf(config),
        **_labels(config),
    }
    if config.vision is not None:
        if config.head != "lm":
            raise CheckpointError(
                f"transformers has no model with head={config.head!r} that also sees; "
                "load its text model alone"
            )
        raw = write_whole(config.vision, raw)
    expected = _comparable(config)
    found = _comparable(read_config(raw, vision=config.vision is not None))
    if found != expected:
        name, wanted, read = _first_difference(expected, found)
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express {name}={wanted!r} with "
            f"the rest of the config; it would be read back as {read!r}"
        )
    return raw


def _first_difference(one: ModelConfig, other: ModelConfig) -> tuple[str, Any, Any]:
    """The name of the first attribute that differs, and both values."""
    for index in range(one.num_layers):
        mine, its = one.layer(index), other.layer(index)
        name = mine.difference(its)
        if name is not None:
            of_layer = f"layers[{index}].{name}"
            return of_layer, getattr(mine, name), getattr(its, name)
    name = next(n for n, v in vars(one).items() if getattr(other, n) != v)
    return name, getattr(one, name), getattr(other, name)


def _architecture(config: ModelConfig, family: Family) -> str:
    """Returns the class in transformers of a model with the config's head."""
    if config.head == "value":
        if family.classifier is None:
            raise CheckpointError(
                f"transformers has no sequence classifier of {config.model_type}, as "
                "which a reward model is saved; use another family"
            )
        return (family.classifier or family.architecture) + VALUE
    if config.head == "process":
        if not family.judges_tokens:
            raise CheckpointError(
                f"transformers has no token classifier of {config.model_type}, as "
                "which a process reward model is saved; use another family"
            )
        return family.architecture + PROCESS
    return family.architecture + LM


def _labels(config: ModelConfig) -> dict[str, Any]:
    names = LABELS.get(config.head)
    if names is None:
        return {}
    return {
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }


def _comparable(config: ModelConfig) -> ModelConfig:
    """Removes differences without a meaning, for a comparison of configs.

    Derived values replace None. `rope_scaling` is dropped, because it has fields that
    its kind does not use; families write it exactly or raise. The context of a run
    without selection is the run's alone.
    """
    indexer, length = config.indexer, config.max_length
    if indexer is not None and length == indexer.top_k:
        length = indexer.context
    return replace(
        config,
        max_length=length,
        rope_scaling=None,
        rotary_dim=config.rotated_dims,
        attention_scale=config.score_scale,
    )
