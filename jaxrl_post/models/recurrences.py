"""The kinds of layers that carry a state along a sequence, in place of attention."""

from dataclasses import dataclass

__all__ = [
    "GatedDelta",
    "LinearAttention",
    "Mamba2",
    "Recurrence",
    "ShortConvolution",
]


def _check_kernel(kernel: int) -> None:
    if kernel < 2:
        raise ValueError(f"config: recurrence.kernel must be at least 2; got {kernel}")


@dataclass(frozen=True)
class ShortConvolution:
    """Gated short convolutions.

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
        _check_kernel(self.kernel)


@dataclass(frozen=True)
class LinearAttention:
    """Heads that each keep a matrix from keys to values.

    A token scales the matrix by a learned factor, writes its value for its key, and
    reads it with a query. Queries, keys and values pass through a short convolution
    each, and the SiLU.

    Attributes:
        kernel: number of tokens of a convolution's sums, at least 2.
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of `key_heads`; each key head serves
            as many neighbouring ones.
        key_dim: width of a key.
        value_dim: width of a value.
    """

    kernel: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check_kernel(self.kernel)
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


@dataclass(frozen=True)
class GatedDelta(LinearAttention):
    """Gated delta nets: a token replaces a learned part of the value of its key.

    The output is normed, and gated by the SiLU of a projection.

    References:
        Yang et al., Gated Delta Networks, arXiv:2412.06464.
    """


@dataclass(frozen=True)
class Mamba2(LinearAttention):
    """Mamba-2: a token adds its value, times a step from which its decay follows too.

    In the paper's terms a query is C, a key B and a value x; `key_heads` is the number
    of groups and `key_dim` the size of the state. The output is gated by the SiLU of a
    projection, and normed over the heads of each key head.

    Attributes:
        kernel_bias: whether the convolutions have biases.

    References:
        Dao and Gu, Transformers are SSMs, arXiv:2405.21060.
    """

    kernel_bias: bool = True


type Recurrence = ShortConvolution | GatedDelta | Mamba2
