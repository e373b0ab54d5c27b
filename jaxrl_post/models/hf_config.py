"""What the families' config.json have in common, read and written.

Two spellings are about. Transformers 4 wrote `rope_theta`, `rope_scaling` and
`torch_dtype`; transformers 5 writes `rope_parameters` and `dtype` and still reads the
old keys. Both are read here as transformers 5 reads them, and both are written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.models.config import ModelConfig, RopeScaling
from jaxrl_post.models.errors import CheckpointError

__all__ = [
    "Defaults",
    "decoder_from_hf",
    "decoder_to_hf",
    "dtype_name",
    "flag",
    "integer",
]

type Json = Mapping[str, Any]

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Defaults:
    """What transformers assumes where config.json lacks a key.

    Attributes:
        max_length: of `max_position_embeddings`.
        num_kv_heads: of `num_key_value_heads`; None for the number of query heads.
        head_dim: 0 for hidden_size / num_heads.
    """

    max_length: int
    num_kv_heads: int | None = None
    head_dim: int = 0


def decoder_from_hf(raw: Json, defaults: Defaults) -> ModelConfig:
    """Reads the keys that all families share.

    Args:
        raw: the parsed config.json.
        defaults: the family's.

    Returns:
        A config without what only some families have: biases, norms of queries and
        keys, windows.

    Raises:
        CheckpointError: a key is missing, of the wrong type, or says something that
            the decoder does not do.
    """
    _refuse_unsupported(raw)
    num_heads = integer(raw, "num_attention_heads")
    max_length = integer(raw, "max_position_embeddings", defaults.max_length)
    kv_heads = raw.get("num_key_value_heads", defaults.num_kv_heads)
    theta, scaling = _rope_from_hf(raw, max_length)
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else kv_heads,
        head_dim=integer(raw, "head_dim", defaults.head_dim),
        max_length=max_length,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=flag(raw, "tie_word_embeddings", False),
    )


def decoder_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that all families share, in both spellings.

    Raises:
        CheckpointError: transformers has no words for the config's rope_scaling.
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
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **_rope_to_hf(config),
    }


def dtype_name(raw: Json) -> str:
    """Returns the dtype that config.json names, "float32" where it names none.

    >>> dtype_name({"torch_dtype": "bfloat16"})
    'bfloat16'
    """
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise CheckpointError(
            f"dtype must be one of {', '.join(known)}; got {name!r}; choose one with "
            f"the dtype argument"
        )
    return name


def integer(raw: Json, key: str, default: int | None = None) -> int:
    """Reads an integer; null counts as absent, and no default as required."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise CheckpointError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be an integer; got {value!r}")
    return value


def flag(raw: Json, key: str, default: bool) -> bool:
    """Reads true or false; null counts as absent."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false; got {value!r}")
    return value


def _number(raw: Json, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{key} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be a number; got {value!r}")
    return float(value)


def _refuse_unsupported(raw: Json) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act must be 'silu'; got {activation!r}")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method")
        raise CheckpointError(
            f"the weights are quantized ({method}); take the unquantized checkpoint"
        )


def _rope_from_hf(raw: Json, max_length: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling; a value inside the dictionary wins over one beside it."""
    rope: Json = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(
            f"rope_parameters must be the same for all layers; got one entry for each "
            f"of {', '.join(rope)}"
        )
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    for place in (rope, raw):
        if _number(place, "partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor must be 1; got {place['partial_rotary_factor']}"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"unknown rope_type {kind!r}; supported: {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return theta, None
    return theta, _scaling_from_hf(kind, rope, max_length)


def _scaling_from_hf(kind: str, rope: Json, max_length: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling("linear", _number(rope, "factor"))
    if kind == "dynamic":
        # Its original length is always max_position_embeddings: transformers ignores
        # `original_max_position_embeddings` here.
        return RopeScaling("dynamic", _number(rope, "factor"))
    original = integer(rope, "original_max_position_embeddings", max_length)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            _number(rope, "factor"),
            original_length=original,
            low_frequency_factor=_number(rope, "low_freq_factor"),
            high_frequency_factor=_number(rope, "high_freq_factor"),
        )

    def optional(key: str) -> float | None:
        return None if rope.get(key) is None else _number(rope, key)

    return RopeScaling(
        "yarn",
        _number(rope, "factor", max_length / original),
        original_length=original,
        # Zero means the default, as transformers reads it.
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=flag(rope, "truncate", True),
    )


def _rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    theta = {"rope_theta": config.rope_theta}
    if config.rope_scaling is None:
        return {
            **theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", **theta},
        }
    scaling = _scaling_to_hf(config.rope_scaling, config.max_length)
    return {**theta, "rope_scaling": scaling, "rope_parameters": {**scaling, **theta}}


def _scaling_to_hf(scaling: RopeScaling, max_length: int) -> dict[str, Any]:
    original = scaling.original_length or max_length
    entries: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return entries
    if scaling.kind == "dynamic":
        if original != max_length:
            raise CheckpointError(
                f"rope_scaling 'dynamic' grows from max_length in transformers, so "
                f"original_length must be None or {max_length}; got {original}"
            )
        return entries
    entries["original_max_position_embeddings"] = original
    if scaling.kind == "llama3":
        entries["low_freq_factor"] = scaling.low_frequency_factor
        entries["high_freq_factor"] = scaling.high_frequency_factor
        return entries
    entries["beta_fast"] = scaling.beta_fast
    entries["beta_slow"] = scaling.beta_slow
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if getattr(scaling, key) is not None:
            entries[key] = getattr(scaling, key)
    if not scaling.truncate:
        entries["truncate"] = False
    return entries
