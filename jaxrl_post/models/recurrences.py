"""The kinds of layers that carry a state along a sequence, in place of attention."""

from dataclasses import dataclass

__all__ = ["GatedDelta", "Recurrence", "ShortConvolution"]


@dataclass(frozen=True)
class ShortConvolution:
    """Gated short convolutions, which take the place of attention in some layers.

    From B, C and x, three projections of a token, u = B x. The output is the projection
    of C y, where y sums the u of the token and of the kernel - 1 tokens before it on
    its path, each channel with weights of its own.

    Attributes:
        kernel: number of tokens of a sum, at least 2.
        bias: whether the projections and the sums have biases.

    References:
        LFM2 Technical Report, arXiv:2511.23404, section 2.
    """

    kernel: int
    bias: bool = False

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ValueError(
                f"config: recurrence.kernel must be at least 2; got {self.kernel}"
            )


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta nets, which take the place of attention in some layers.

    A head keeps a matrix that maps keys to values. A token scales it by a learned
    factor, replaces a learned part of the value that it has for the token's key, and
    reads it with a query. Queries, keys and values pass through a short convolution
    each, and the SiLU; the output is normed, and gated by the SiLU of a projection.

    Attributes:
        kernel: number of tokens of a convolution's sums, at least 2.
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of `key_heads`; each key head serves
            as many neighbouring ones.
        key_dim: width of a key.
        value_dim: width of a value.

    References:
        Yang et al., Gated Delta Networks, arXiv:2412.06464.
    """

    kernel: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ValueError(
                f"config: recurrence.kernel must be at least 2; got {self.kernel}"
            )
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"config: recurrence.{name} must be at least 1; got "
                    f"{getattr(self, name)}"
                )
        if self.value_heads % self.key_heads:
            raise ValueError(
                "config: recurrence.value_heads must be a multiple of key_heads="
                f"{self.key_heads}; got {self.value_heads}"
            )


type Recurrence = ShortConvolution | GatedDelta
