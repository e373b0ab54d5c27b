"""The parts of layers: what may differ from layer to layer."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

__all__ = [
    "HeadSpec",
    "Indexer",
    "LayerSpec",
    "PerLayerEmbedding",
    "check_indexed",
    "check_keys",
]


@dataclass(frozen=True)
class HeadSpec:
    """The heads of attention in a layer.

    Attributes:
        head_dim: width of a head of queries, keys or values.
        num_kv_heads: key/value heads.
        rotary_share: share of a head's pairs of dims i and head_dim / 2 + i that
            rotate. These are the first pairs, with the frequencies that they have where
            all pairs rotate ("proportional" rotary embedding).
        keys_as_values: values are keys before the keys' norm and rotation.
    """

    head_dim: int
    num_kv_heads: int
    rotary_share: float = 1.0
    keys_as_values: bool = False

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                "config: head_dim must be even for rotary embeddings; got "
                f"{self.head_dim} in a layer's heads"
            )
        if self.num_kv_heads < 1:
            raise ValueError(
                f"config: num_kv_heads must be at least 1; got {self.num_kv_heads} in "
                "a layer's heads"
            )
        if not 0 < self.rotary_share <= 1:
            raise ValueError(
                f"config: rotary_share must be in (0, 1]; got {self.rotary_share}"
            )

    @property
    def rotated_pairs(self) -> int:
        """Number of pairs of dims that rotate."""
        return int(self.rotary_share * self.head_dim // 2)


@dataclass(frozen=True)
class LayerSpec:
    """The parts of one layer, which may differ from layer to layer.

    Attributes:
        mixer: the part that combines tokens: attention; the recurrence of the config;
            or None for a layer with an MLP alone.
        mlp: the part after it: a dense MLP; the mixture of experts of the config; both,
            whose outputs are added; or None for a layer with a mixer alone.
        window: sliding window of attention in tokens, None for full attention.
        rotated: whether attention has rotary embeddings.
        indexed: whether sparse attention has an indexer here. Without one, a query sees
            the keys that were chosen in the last layer that has one.
        heads: the heads of attention; None for the config's.
        keys_of: the earlier layer whose keys and values attention reads. Such a layer
            makes no keys and values, and has none in a cache. None for its own.
        mlp_multiple: width of the dense MLP, in multiples of `intermediate_size`.
    """

    mixer: Literal["attention", "recurrence"] | None = "attention"
    mlp: Literal["dense", "experts", "both"] | None = "dense"
    window: int | None = None
    rotated: bool = True
    indexed: bool = True
    heads: HeadSpec | None = None
    keys_of: int | None = None
    mlp_multiple: int = 1

    def __post_init__(self) -> None:
        if self.mixer is None and self.mlp is None:
            raise ValueError(
                "config: a layer must have a mixer or an MLP; got None for both"
            )
        if self.mixer != "attention" and (self.heads or self.keys_of is not None):
            raise ValueError(
                "config: heads and keys_of must be None in a layer without attention; "
                f"got {self.heads} and {self.keys_of}"
            )
        if self.mlp_multiple < 1:
            raise ValueError(
                f"config: mlp_multiple must be at least 1; got {self.mlp_multiple}"
            )

    def has(self, part: str) -> bool:
        """Whether a layer has attention, a recurrence, a dense MLP or experts.

        >>> LayerSpec(mlp="both").has("dense"), LayerSpec().has("experts")
        (True, False)
        """
        both = self.mlp == "both" and part in ("dense", "experts")
        return both or part in (self.mixer, self.mlp)

    @property
    def makes_keys(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.mixer == "attention" and self.keys_of is None

    def difference(self, other: "LayerSpec") -> str | None:
        """The name of the first attribute that differs, or None."""
        names = (field.name for field in fields(self))
        return next((n for n in names if getattr(self, n) != getattr(other, n)), None)


def check_keys(layers: Sequence[LayerSpec]) -> None:
    """Checks that a layer without keys reads the keys of a layer like itself.

    Raises:
        ValueError: `keys_of` is no earlier layer with keys of its own, or that layer
            has another window, rotation or other heads.
    """
    for index, spec in enumerate(layers):
        if spec.keys_of is None:
            continue
        source = layers[spec.keys_of] if 0 <= spec.keys_of < index else None
        if source is None or not source.makes_keys:
            raise ValueError(
                f"config: keys_of of layer {index} must be an earlier layer with keys "
                f"of its own; got {spec.keys_of}"
            )
        for name in ("window", "rotated", "heads"):
            own, theirs = getattr(spec, name), getattr(source, name)
            if own != theirs:
                raise ValueError(
                    f"config: {name} of layer {index} must be {theirs}, as in layer "
                    f"{spec.keys_of}, whose keys it reads; got {own}"
                )


def check_indexed(layers: Sequence[LayerSpec]) -> None:
    """Checks that sparse attention has keys to choose from in every layer.

    Raises:
        ValueError: the first layer has no indexer, or a layer has a window.
    """
    if not layers[0].indexed:
        raise ValueError(
            "config: indexed of layer 0 must be True with an indexer: no layer comes "
            "before it whose choice it could use; got False"
        )
    for index, spec in enumerate(layers):
        if spec.window is not None:
            raise ValueError(
                f"config: window of layer {index} must be None with an indexer, which "
                f"chooses among all earlier tokens; got {spec.window}"
            )


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention, which chooses the keys that a query sees.

    Queries of sequences of at most `top_k` tokens see all keys. A config whose
    `max_length` is no more than `top_k` has no longer ones, so it computes nothing with
    the indexer's parameters; `models.selection` has the mathematics of the others.

    Attributes:
        top_k: number of keys that a query sees.
        num_heads: heads of the indexer.
        head_dim: width of its heads, at least the rotated dims.
        context: context length of the sparse model, in tokens.
        interleaved: neighbouring dims of its heads rotate together, not the two halves.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.
    """

    top_k: int
    num_heads: int
    head_dim: int
    context: int = 4096
    interleaved: bool = False


@dataclass(frozen=True)
class PerLayerEmbedding:
    """A small embedding of each token for every layer, which its end reads.

    A layer's input e is (RMSNorm(P x / sqrt(hidden_size)) + sqrt(size) E) / sqrt(2),
    with x the token's scaled embedding and E its row of a table of the layer. At the
    layer's end the hidden state h becomes h + RMSNorm(U (act(G h) * e)).

    Attributes:
        vocab_size: rows of the tables.
        size: width of an embedding.

    References:
        Google DeepMind, Gemma 3n and Gemma 4.
    """

    vocab_size: int
    size: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.size < 1:
            raise ValueError(
                "config: sizes of per-layer embeddings must be at least 1; got "
                f"vocab_size={self.vocab_size} and size={self.size}"
            )
