"""Hyperparameters of a decoder-only transformer."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Head", "ModelConfig", "RopeScaling"]

# What stands on the last hidden state: the vocabulary; one number, as in critics and
# reward models; or both, as in a critic that shares the policy's backbone.
Head = Literal["lm", "value", "lm+value"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pre-training context.

    Attributes:
        kind: "linear" (Chen et al., arXiv:2306.15595), "dynamic" (NTK-aware, grows with
            the sequence), "llama3" (Llama 3.1), "yarn" (arXiv:2309.00071).
        factor: target context over original context, >= 1.
        original_length: context length of pre-training, in tokens; None means the
            config's `max_length`.
        low_frequency_factor: llama3 only.
        high_frequency_factor: llama3 only.
        beta_fast: yarn only; rotations over the original context above which a
            frequency is left as it is.
        beta_slow: yarn only; rotations below which it is fully interpolated.
        attention_factor: yarn only; scale of cos and sin, None for 0.1 ln(factor) + 1.
        mscale: yarn only, as DeepSeek writes it; None where the checkpoint has none.
        mscale_all_dim: yarn only, as DeepSeek writes it.
        truncate: yarn only; whether the correction range is rounded to whole dims.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float = 1.0
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: Llama 3.x, Qwen2/2.5 and Qwen3 are points of this space.

    Frozen and hashable: it is static under jit. Mesh and kernels are never in it.

    Attributes:
        model_type: the family, by Hugging Face's name ("llama", "qwen2", "qwen3").
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: number of decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of a head; even.
        max_length: context length in tokens.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for plain rotary embeddings.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases in the MLP.
        qk_norm: RMSNorm over each query and key head before RoPE.
        tie_embeddings: the embedding also maps hidden states to logits.
        windows: sliding-window width in tokens of each layer, None where attention is
            full; the empty tuple means full attention everywhere.
        head: what the model says about its last hidden state.

    >>> config = ModelConfig("llama", 256, 64, 128, 2, num_heads=4, num_kv_heads=2)
    >>> config.head_dim
    16
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    max_length: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    head: Head = "lm"

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"config: {name} must be at least 1; got {getattr(self, name)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config: num_heads must be a multiple of num_kv_heads; "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"config: head_dim must be even for rotary embeddings; "
                f"got {self.head_dim}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"config: windows must be empty or name all {self.num_layers} layers; "
                f"got {len(self.windows)} entries"
            )

    def window(self, layer: int) -> int | None:
        """Sliding-window width of a layer, None for full attention."""
        return self.windows[layer] if self.windows else None
