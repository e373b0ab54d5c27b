"""The static description of a vision tower."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["VisionActivation", "VisionConfig", "VisionInputs"]

VisionActivation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and options of a vision tower; hashable, so it can be static under jit.

    Two kinds of towers are covered. Qwen2.5-VL: RMSNorm, a gated MLP, attention inside
    of windows in most layers. Qwen3-VL and Qwen3.5: LayerNorm, a plain MLP, a learned
    grid of positions, attention among all patches of a picture.

    Attributes:
        model_type: of transformers' vision configuration, such as "qwen3_vl".
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: number of layers.
        num_heads: heads of attention.
        out_hidden_size: width of the embeddings, the language model's hidden size.
        patch_size: side of a patch, in pixels.
        temporal_patch_size: frames of a patch.
        merge_size: side of the block of patches that becomes one token.
        channels: of a picture.
        norm: "rms" without biases, or "layer" with biases.
        norm_eps: epsilon of all norms.
        gated: whether the MLP has a gate.
        activation: of the MLP.
        patch_bias: whether the projection of a patch has a bias.
        num_positions: entries of the learned grid of positions, a square; 0: no grid.
        window_size: side of an attention window, in pixels; None: full attention.
        full_layers: with windows, the layers with full attention nonetheless.
        levels: layers whose output also goes to the language model (DeepStack); the
            i-th of them is added to the image tokens after the decoder's layer i.
        rope_theta: base of the rotary embedding.
        initializer_range: standard deviation of new matrices.
        tokens_per_second: of videos; the tower does not read it.

    Raises:
        ValueError: sizes do not fit one another.

    References:
        Bai et al., Qwen2.5-VL Technical Report, arXiv:2502.13923.
        Meng et al., DeepStack, arXiv:2406.04334.

    >>> config = VisionConfig("qwen3_vl", 32, 64, 2, 2, 48, num_positions=16)
    >>> config.head_dim, config.patch_width, config.side
    (16, 1536, 4)
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    out_hidden_size: int
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    channels: int = 3
    norm: Literal["rms", "layer"] = "layer"
    norm_eps: float = 1e-6
    gated: bool = False
    activation: VisionActivation = "gelu_tanh"
    patch_bias: bool = True
    num_positions: int = 0
    window_size: int | None = None
    full_layers: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    rope_theta: float = 1e4
    initializer_range: float = 0.02
    tokens_per_second: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                "hidden_size must be a multiple of 4 x num_heads, because half of a "
                "head rotates by row and half by column; got "
                f"{self.hidden_size} and {self.num_heads}"
            )
        if self.side**2 != self.num_positions:
            raise ValueError(
                f"num_positions must be a square; got {self.num_positions}"
            )
        if self.window_size is not None and self.window < 1:
            raise ValueError(
                "window_size must be at least one block of patches "
                f"({self.merge_size} x {self.patch_size} pixels); got "
                f"{self.window_size}"
            )
        layers = range(self.num_layers)
        for name in ("full_layers", "levels"):
            listed = getattr(self, name)
            if not set(listed) <= set(layers) or list(listed) != sorted(set(listed)):
                raise ValueError(
                    f"{name} must be layers below {self.num_layers}, in order; got "
                    f"{listed}"
                )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Numbers of one patch."""
        return self.frame_width * self.temporal_patch_size

    @property
    def frame_width(self) -> int:
        """Numbers of one frame of a patch."""
        return self.channels * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of a block of patches, side by side."""
        return self.hidden_size * self.merge_size**2

    @property
    def side(self) -> int:
        """Side of the learned grid of positions."""
        return math.isqrt(self.num_positions)

    @property
    def window(self) -> int:
        """Side of an attention window, in blocks of patches; 0 without windows."""
        return (self.window_size or 0) // self.merge_size // self.patch_size

    def windowed(self, layer: int) -> bool:
        """Whether a layer's attention stays inside of windows."""
        return self.window_size is not None and layer not in self.full_layers


@dataclass(frozen=True)
class VisionInputs:
    """Pictures among the tokens of a model that also sees.

    Attributes:
        tower: computes embeddings, one for each image token.
        image_token: id of the image tokens.
        sections: frequencies of the rotary embedding that rotate by time, row and
            column; they sum to half of the rotated dims.
        interleaved: as for `models.rope.mrope_axes`.
        marks: names and ids of the other tokens that config.json has for pictures.

    References:
        Wang et al., Qwen2-VL, arXiv:2409.12191 (M-RoPE).
    """

    tower: VisionConfig
    image_token: int
    sections: tuple[int, int, int]
    interleaved: bool
    marks: tuple[tuple[str, int], ...] = ()

    def check(
        self, *, hidden_size: int, rotated_dims: int, vocab_size: int, num_layers: int
    ) -> None:
        """Refuses a tower of another width, and sections that do not fit."""
        if self.tower.out_hidden_size != hidden_size:
            raise ValueError(
                "config: out_hidden_size of the vision tower must be the hidden_size "
                f"{hidden_size}; got {self.tower.out_hidden_size}"
            )
        if sum(self.sections) != rotated_dims // 2:
            raise ValueError(
                f"config: vision.sections must sum to {rotated_dims // 2}, half of the "
                f"rotated dims; got {self.sections}"
            )
        if not 0 <= self.image_token < vocab_size:
            raise ValueError(
                "config: vision.image_token must lie in the vocabulary of "
                f"{vocab_size}; got {self.image_token}"
            )
        if len(self.tower.levels) > num_layers:
            raise ValueError(
                f"config: the vision tower must have at most {num_layers} levels, one "
                f"a layer; got {len(self.tower.levels)}"
            )
