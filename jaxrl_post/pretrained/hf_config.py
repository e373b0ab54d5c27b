"""Reads and writes the keys of config.json that several families share."""

from dataclasses import dataclass
from typing import Any

from jaxrl_post.models.config import Activation, ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.hf_rope import (
    FULL,
    SLIDING,
    Rotation,
    layer_ropes,
    rope_from_hf,
    rope_to_hf,
    rotation_from_hf,
    scaling_to_hf,
)
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    number,
    optional_integer,
    optional_number,
    section,
    text,
)

__all__ = [
    "Defaults",
    "declared_next_token_layers",
    "decoder_from_hf",
    "decoder_to_hf",
    "dtype_name",
]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Families with a gate would apply such an activation to the gate.
UNGATED: dict[str, Activation] = {"relu2": "relu2"}
ACTIVATION_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Defaults:
    """A family's defaults in transformers for absent keys, and its options.

    Attributes:
        max_length: default of `max_position_embeddings`.
        num_kv_heads: default of `num_key_value_heads`; None: number of query heads.
        head_dim: default of `head_dim`; 0 for hidden_size / num_heads.
        rms_norm_eps: default of `rms_norm_eps`.
        rope_theta: default of `rope_theta`.
        rotary_share: default of `partial_rotary_factor`.
        partial: whether the family supports a `partial_rotary_factor` other than 1.
        tie_embeddings: default of `tie_word_embeddings`.
        activation_key: key of the activation function.
        activation: default of `activation_key`.
        gated: whether MLPs have a gate.
        width_key: key of the MLP's width.
        local_theta: default base of the rotary embedding of sliding layers; None if all
            layers have the same embedding.
        local_theta_key: key of that base in transformers 4; "" if it has none.
    """

    max_length: int
    num_kv_heads: int | None = None
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rotary_share: float = 1.0
    partial: bool = False
    tie_embeddings: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    gated: bool = True
    width_key: str = "intermediate_size"
    local_theta: float | None = None
    local_theta_key: str = ""


def decoder_from_hf(raw: Json, defaults: Defaults) -> ModelConfig:
    """Reads the keys that all families share.

    Args:
        raw: the parsed config.json.
        defaults: the family's defaults.

    Returns:
        A config without options of some families: biases, query-key norms, windows.

    Raises:
        CheckpointError: a key is missing, has the wrong type, or has a value that the
            decoder does not support.
    """
    _check_decoder(raw)
    activation = text(raw, defaults.activation_key, defaults.activation)
    known = ACTIVATIONS if defaults.gated else UNGATED
    if activation not in known:
        raise CheckpointError(
            f"{defaults.activation_key} must be one of {', '.join(known)}; got "
            f"{activation!r}"
        )
    num_heads = integer(raw, "num_attention_heads")
    max_length = integer(raw, "max_position_embeddings", defaults.max_length)
    if defaults.local_theta is None:
        local_theta, share = None, defaults.rotary_share
        rotation = rope_from_hf(raw, max_length, theta=defaults.rope_theta, share=share)
    else:
        rotation, local_theta = _ropes_by_layer(
            raw, max_length, defaults, defaults.local_theta
        )
    if rotation.share != 1.0 and not defaults.partial:
        raise CheckpointError(
            f"partial_rotary_factor must be 1; got {rotation.share:g}"
        )
    hidden_size = integer(raw, "hidden_size")
    head_dim = optional_integer(raw, "head_dim", defaults.head_dim or None)
    head_dim = head_dim or hidden_size // num_heads
    # Null means the number of query heads, not the family's default.
    num_kv_heads = optional_integer(raw, "num_key_value_heads", defaults.num_kv_heads)
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, defaults.width_key),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim,
        max_length=max_length,
        rms_norm_eps=number(raw, "rms_norm_eps", defaults.rms_norm_eps),
        rope_theta=rotation.theta,
        rope_scaling=rotation.scaling,
        local_rope_theta=local_theta,
        rotary_dim=None if rotation.share == 1.0 else int(head_dim * rotation.share),
        activation=known[activation],
        tie_embeddings=flag(raw, "tie_word_embeddings", defaults.tie_embeddings),
        initializer_range=number(raw, "initializer_range", 0.02),
    )


def decoder_to_hf(config: ModelConfig, defaults: Defaults) -> dict[str, Any]:
    """Writes the keys that all families share, as in transformers 4 and 5.

    Args:
        config: the model's config.
        defaults: the family's defaults.

    Raises:
        CheckpointError: transformers cannot express the config's rope_scaling.
    """
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        defaults.activation_key: ACTIVATION_NAMES.get(config.activation, "silu"),
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        **rope_to_hf(config, partial=defaults.partial),
        **_ropes_by_layer_to_hf(config, defaults),
    }


def _ropes_by_layer(
    raw: Json, max_length: int, defaults: Defaults, local_theta: float
) -> tuple[Rotation, float]:
    """Reads the rotary embedding of full layers and the base of sliding layers."""
    theta = defaults.rope_theta
    rope, local_rope = layer_ropes(raw)
    if defaults.local_theta_key:
        local_theta = number(raw, defaults.local_theta_key, local_theta)
    elif "rope_theta" not in local_rope and raw.get("rope_theta", theta) != theta:
        raise CheckpointError(
            f"rope_theta must be {theta:g} where it is the base of all layers; got "
            f"{raw['rope_theta']!r}, which transformers 4 gives to sliding layers too, "
            f"and 5 does not; give a rope_theta for {FULL} and one for {SLIDING} in "
            f"rope_parameters"
        )
    share = optional_number(raw, "partial_rotary_factor") or 1.0
    base = number(raw, "rope_theta", theta)
    full = rotation_from_hf(rope, {}, max_length, theta=base, share=share)
    # transformers reads `truncate` from the outer dictionary, which never has it.
    if full.scaling is not None and not full.scaling.truncate:
        raise CheckpointError(
            f"truncate must be true for {FULL}; got false, which transformers ignores "
            f"here"
        )
    local = rotation_from_hf(local_rope, {}, max_length, theta=local_theta, share=share)
    if local.scaling is not None or local.share != full.share:
        raise CheckpointError(
            f"rope_parameters: {SLIDING} must have rope_type 'default' and no "
            f"partial_rotary_factor of its own; got {dict(local_rope)}"
        )
    return full, local.theta


def _ropes_by_layer_to_hf(config: ModelConfig, defaults: Defaults) -> dict[str, Any]:
    """Writes the keys of rotary embeddings that differ by kind of layer, if they do."""
    if defaults.local_theta is None:
        return {}
    local = config.local_rope_theta or config.rope_theta
    top = {defaults.local_theta_key: local} if defaults.local_theta_key else {}
    full = scaling_to_hf(config) or {"rope_type": "default"}
    return {
        **top,
        "rope_parameters": {
            FULL: {**full, "rope_theta": config.rope_theta},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def declared_next_token_layers(raw: Json) -> int:
    """Reads the number of multi-token prediction layers; 1 if config.json has no key.

    Raises:
        CheckpointError: the number is out of range.
    """
    for place in (raw, section(raw, "text_config")):
        for key in ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"):
            if key in place:
                return integer(place, key)
    return 1


def dtype_name(raw: Json) -> str:
    """Returns the dtype in config.json, "float32" if config.json has none.

    >>> dtype_name({"torch_dtype": "bfloat16"})
    'bfloat16'
    """
    places = (raw, section(raw, "text_config"))
    names = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
    name = next((name for name in names if name is not None), "float32")
    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise CheckpointError(
            f"dtype must be one of {', '.join(known)}; got {name!r}; choose one with "
            f"the dtype argument"
        )
    return name


def _check_decoder(raw: Json) -> None:
    """Refuses attention and layers that the decoder does not support."""
    # transformers tests the truth of `is_causal`, so null means false.
    if raw.get("is_causal", True) is not True:
        raise CheckpointError(
            f"is_causal must be true; got {raw['is_causal']!r}; this decoder's "
            "attention is causal"
        )
    for key in ("is_bidirectional", "use_bidirectional_attention"):
        if raw.get(key) not in (None, False):
            raise CheckpointError(
                f"{key} must be false; got {raw[key]!r}; this decoder's attention is "
                "causal"
            )
    if raw.get("per_layer_config"):
        raise CheckpointError(
            "per_layer_config must be absent; layers of different sizes cannot be read"
        )
