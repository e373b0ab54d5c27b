"""Options of adapters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import NOT_NEGATIVE, POSITIVE

__all__ = ["AdapterConfig"]


@dataclass(frozen=True)
class AdapterConfig:
    """Training an adapter in place of the model's own parameters.

    A value head, or that of a process reward model, is trained whole with it.

    Attributes:
        rank: of the change of a matrix; 0 trains all parameters and no adapter.
        alpha: the change is multiplied by alpha / rank.
        targets: names of the matrices to adapt, such as query and value; none for all
            of attention and of MLPs, but for experts' own.
        rank_stabilized: alpha / sqrt(rank) instead.
        dora: adapts magnitude and direction separately.
        quantize: holds the frozen matrices in 8 or 4 bits.
    """

    rank: Annotated[int, NOT_NEGATIVE] = 0
    alpha: Annotated[float, POSITIVE] = 32.0
    targets: tuple[str, ...] = ()
    rank_stabilized: bool = False
    dora: bool = False
    quantize: Literal["int8", "nf4"] | None = None
